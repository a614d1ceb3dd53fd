"""Steps of steady decodes alone reuse the batch of the step before: it must be the one that would be made anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from foliolm.core.plan import Admission, DecodeRows, LogitsAt, Row, StepPlan
from foliolm.core.request import FinishReason
from foliolm.executor.torch.batch import BatchBuilder
from foliolm.executor.torch.executor import TorchExecutor
from foliolm.executor.torch.kept_step import KeptStep
from foliolm.model.native import NativeModel
from support.tiny_models import ours_on, reference
from support.torch_engine import GREEDY, generate, request

PROMPT = list(range(3, 24))


@pytest.fixture(scope="module", params=["native", "portable"])
def model(request):
    return ours_on(request.param, reference("mistral", sliding_window=9), "mistral")


@pytest.fixture
def compared(monkeypatch):
    """Every batch that a run makes is compared with one made anew; counts those that were kept."""
    build, counts = BatchBuilder.build, {"kept": 0, "all": 0}
    advanced = KeptStep.advanced

    def counted(kept, tick):
        batch = advanced(kept, tick)
        counts["kept"] += batch is not None
        return batch

    def checked(builder, plan):
        batch = build(builder, plan)
        anew = BatchBuilder(
            builder._table, [], builder._p, builder._grouping, True, builder._device, builder._dtype, builder._adapters
        )
        anew._windows, anew._keeps = builder._windows, False
        changed = replace(plan.decodes, grown=())
        rows = tuple(replace(row, new_blocks=(), whole_table=False) for row in plan.rows)
        again = build(anew, replace(plan, decodes=changed, rows=rows, forks=(), own_blocks=()))
        if not plan.rows:  # others may be ordered in another way where decodes joined since
            same(batch, again)
        counts["all"] += 1
        return batch

    monkeypatch.setattr(KeptStep, "advanced", counted)
    monkeypatch.setattr(BatchBuilder, "build", checked)
    return counts


def by_request(batch):
    """What each row computes, whatever the order of the rows."""
    step, found = batch.step, {}
    for slot, at in zip(batch.sampled_slots.tolist(), step.rows.tolist(), strict=True):
        entry = [int(step.input_ids[at]), int(step.positions[at])]
        for layout in step.layouts:
            rows = layout.varlen
            row = int(torch.searchsorted(rows.cu_seq_q, at, right=True)) - 1
            blocks = rows.block_table[row, : -(-int(rows.seqused_k[row]) // 4)].tolist()
            entry += [int(layout.slots[at]), int(rows.seqused_k[row]), blocks, rows.max_q, rows.max_k]
        found[slot] = entry
    return found


def same(batch, anew):
    assert (batch.plain, batch.greedy) == (anew.plain, anew.greedy)
    assert by_request(batch) == by_request(anew)


def test_kept_batches_are_those_made_anew(model, compared):
    requests = [request(i, PROMPT[i:] * (1 + i % 3), max_tokens=5 + 9 * i) for i in range(1, 8)]
    run = generate(model, requests, block_size=4, num_blocks=75, chunk=12)
    assert run.preemptions > 0
    assert 20 < compared["kept"] < compared["all"]
    free = generate(model, requests, block_size=4, num_blocks=400)
    assert {rid: each.tokens for rid, each in free.by_id.items()} == {r: each.tokens for r, each in run.by_id.items()}


def test_forks_and_own_blocks_are_seen(model, compared):
    family = [
        replace(request(1 + child, PROMPT, max_tokens=20, temperature=1.0, seed=child), sibling=child)
        for child in range(3)
    ]
    run = generate(model, family, block_size=4)
    assert run.stats.copied_blocks > 0
    assert compared["kept"] > 10
    assert len({tuple(each.tokens) for each in run.by_id.values()}) == 3


def admitted(executor, tokens, table):
    row = Row(1, len(tokens), 0, (tuple(table),), True, LogitsAt.LAST)
    note = Admission(1, tuple(tokens), len(tokens), GREEDY, ())
    executor.submit(StepPlan(1, 0, rows=(row,), admissions=(note,))).wait()


def decode(step, context, tick, grown=()):
    return StepPlan(step, 0, decodes=DecodeRows((1,), (context - tick,), tick, 1, context, grown))


def test_a_plan_that_runs_ahead_of_a_kept_step_is_refused(model):
    executor = TorchExecutor(model, num_blocks=20, block_size=4)
    admitted(executor, PROMPT, range(1, 7))  # 21 tokens of 24
    for tick in range(3):
        executor.submit(decode(2 + tick, 21 + tick, tick)).wait()
    with pytest.raises(ValueError, match="holds 6 blocks of 4 tokens"):
        executor.submit(decode(5, 24, 3)).wait()
    executor.submit(decode(6, 24, 3, ((1, ((9,),)),))).wait()
    executor.submit(decode(7, 25, 4)).wait()
    with pytest.raises(ValueError, match="position 27 of a request that has 27 tokens"):
        executor.submit(decode(8, 27, 6)).wait()  # a step was left out
    executor.submit(decode(9, 26, 5)).wait()


@pytest.mark.parametrize("more", [{}, {"temperature": 1.5, "seed": 7}, {"logprobs": 1}])
def test_a_row_that_is_not_finite_ends_alone(model, monkeypatch, more):
    """Beside greedy rows, a random one, and one that reports logprobs, which takes the other path."""
    requests = [request(1, PROMPT), request(2, PROMPT[2:]), request(3, PROMPT[4:], **more)]
    calm = generate(model, requests)
    forward, steps = NativeModel.forward, []

    def spoilt(self, step, *rest):
        hidden = forward(self, step, *rest)
        steps.append(step)
        if len(steps) == 5:
            at = next(i for i, row in enumerate(step.rows.tolist()) if int(step.positions[row]) == len(PROMPT) - 2 + 3)
            hidden[at] = np.nan
        return hidden

    monkeypatch.setattr(NativeModel, "forward", spoilt)
    run = generate(model, requests)
    assert run.by_id[2].finish is FinishReason.ERROR
    assert run.by_id[2].error == "the model's logits are not finite"
    assert run.by_id[2].tokens == calm.by_id[2].tokens[: len(run.by_id[2].tokens)] != calm.by_id[2].tokens
    for other in (1, 3):
        assert run.by_id[other].tokens == calm.by_id[other].tokens
        assert run.by_id[other].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "asked",
    [
        [{}],
        [{"temperature": 1.0, "seed": 3}],
        [{}, {"temperature": 2.0, "seed": 4, "top_k": 30}, {"temperature": 0.7, "seed": 5, "top_p": 0.9}],
    ],
    ids=["greedy", "random", "both"],
)
def test_plain_rows_take_the_tokens_that_reported_rows_take(model, asked):
    """Those go another way: all their logits come back, and each step asks anew."""
    prompts = [(PROMPT[i:], asked[i % len(asked)]) for i in range(6)]
    plain = generate(model, [request(i, prompt, max_tokens=30, **each) for i, (prompt, each) in enumerate(prompts)])
    reported = generate(
        model, [request(i, prompt, max_tokens=30, logprobs=0, **each) for i, (prompt, each) in enumerate(prompts)]
    )
    assert [each.tokens for each in plain.by_id.values()] == [each.tokens for each in reported.by_id.values()]
