"""Rows of many adapters and of the bare model in one batch, against models with the adapters merged in."""

from dataclasses import replace

import pytest
import torch

from foliolm.core.adapter import AdapterLoad
from foliolm.core.plan import Admission, LogitsAt, Row, StepPlan
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.executor import TorchExecutor
from support.adapters import ALL, merged, write_adapter
from support.same_tokens import assert_same_tokens
from support.tiny_models import ours_on, reference, reference_greedy, reference_logits
from support.torch_engine import generate, request

PROMPT = [7, 3, 90, 41, 11, 8, 120, 5, 77, 31, 2, 9]
KINDS = (
    {"targets": ("q_proj", "v_proj"), "rank": 4},
    {"targets": ALL, "rank": 8},
    {"targets": ("o_proj",), "rank": 1},
    {"targets": ("gate_proj", "down_proj"), "rank": 16, "alpha": 4},
    {"targets": ("k_proj", "up_proj"), "rank": 3},
    {"targets": (*ALL, "lm_head"), "rank": 5},
    {"targets": ("lm_head",), "rank": 2},
    {"targets": ("q_proj", "k_proj", "v_proj"), "rank": 4, "ranks": {"k_proj": 12}, "use_rslora": True},
)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request):
    return request.param, reference(request.param)


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    home = tmp_path_factory.mktemp("adapters")
    return [write_adapter(home / str(i), base[1], seed=i, size=0.15, **kind) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def twins(base, folders):
    return [base[1], *(merged(base[1], folder) for folder in folders)]


def executor_with(model, folders, max_loras=8, **settings):
    executor = TorchExecutor(model, num_blocks=200, block_size=16, max_loras=max_loras, max_lora_rank=16, **settings)
    for load_id, folder in enumerate(folders, start=1):
        _, packed = executor.adapters.read(str(load_id), str(folder))
        executor.adapters.put(load_id, packed)
    return executor


@pytest.mark.parametrize("backend", ["torch", "native", "portable"])
def test_logits_of_a_mixed_batch_equal_those_of_merged_models(base, folders, twins, backend):
    """Eight adapters and the bare model in one step, prompts and single tokens side by side."""
    kind, model = base
    executor = executor_with(ours_on(backend, model, kind), folders)
    params = SamplingParams(temperature=0.0, prompt_logprobs=20, logprobs=20)
    admissions, rows = [], []
    for rid, adapter in enumerate([None, *range(1, 9)]):
        prompt = tuple(PROMPT[: 3 + rid])
        admissions.append(Admission(rid, prompt, len(prompt), params, (), adapter))
        blocks = ((rid + 1,),)
        rows.append(Row(rid, len(prompt), 0, blocks, True, LogitsAt.LAST | LogitsAt.ALL, adapter=adapter))
    loads = tuple(AdapterLoad(load_id, load_id - 1) for load_id in range(1, 9))
    plan = StepPlan(1, 0, rows=tuple(reversed(rows)), admissions=tuple(admissions), adapters_in=loads)
    result = executor.submit(plan).wait()
    for index, row in enumerate(plan.rows):
        prompt = PROMPT[: row.num_new_tokens]
        expected = torch.log_softmax(reference_logits(twins[row.adapter or 0], prompt), -1)
        (last,) = result.logprobs[index]
        found = [*result.prompt_logprobs[index][1:], last]
        for position, entry in enumerate(found):
            for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                assert abs(logprob - float(expected[position, token])) < 1e-3, (row.adapter, position)
    executor.close()


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    "settings",
    [
        {"chunk": 64},
        {"chunk": 5, "block_size": 4, "enable_prefix_caching": True},
        {"chunk": 16, "block_size": 4, "num_blocks": 34, "watermark_blocks": 0},
        {"chunk": 16, "max_loras": 2},
        {"chunk": 7, "max_loras": 3, "lora_grouping": "cost", "depth": 1},
    ],
    ids=["whole", "chunks-prefixes", "preempted", "two-slots", "three-slots-by-cost"],
)
def test_tokens_are_those_of_each_alone(base, folders, twins, backend, settings):
    kind, model = base
    adapters = [None, 1, 2, 6, 7, 8, 1, None, 6]
    requests = [
        replace(request(i + 1, PROMPT[: 8 + i % 4], max_tokens=10), adapter=adapter)
        for i, adapter in enumerate(adapters)
    ]
    run = generate(ours_on(backend, model, kind), requests, adapters=folders, **settings)
    if "num_blocks" in settings:
        assert run.preemptions
    for each in requests:
        tokens, gaps = reference_greedy(twins[each.adapter or 0], list(each.prompt_token_ids), 10)
        assert_same_tokens(run.by_id[each.request_id].tokens, tokens, gaps)
    for plan in run.plans:
        distinct = {rows.load_id for rows in plan.adapters}
        assert len(distinct) <= settings.get("max_loras", 8)
        assert sum(rows.rows for rows in plan.adapters) == sum(
            1 for row in plan.all_rows() if adapters[row.request_id - 1] is not None
        )


def test_a_slot_is_filled_again_only_when_another_adapter_was_in_it(base, folders):
    """Whoever comes back finds its adapter where it was."""
    kind, model = base
    requests = [replace(request(i + 1, PROMPT[:6], max_tokens=3), adapter=1 + i % 2, arrival_ns=i) for i in range(6)]
    run = generate(ours_on("torch", model, kind), requests, adapters=folders, max_num_seqs=1, max_loras=2)
    assert [load for plan in run.plans for load in plan.adapters_in] == [AdapterLoad(1, 0), AdapterLoad(2, 1)]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_bare_rows_are_untouched_to_the_bit(base, folders, backend):
    kind, model = base
    mine = ours_on(backend, model, kind)
    alone = generate(mine, [request(1, PROMPT, logprobs=5)])
    beside = generate(
        mine, [request(1, PROMPT, logprobs=5), replace(request(2, PROMPT[:5]), adapter=2)], adapters=folders, chunk=64
    )
    # The same kernels, and other sums only where PyTorch or a tile takes another order for another batch.
    assert beside.by_id[1].tokens == alone.by_id[1].tokens
    for a, b in zip(alone.by_id[1].logprobs, beside.by_id[1].logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_an_adapter_that_is_in_no_slot_fails_the_step(base, folders):
    kind, model = base
    executor = executor_with(ours_on("torch", model, kind), folders)
    admission = Admission(1, (5, 6), 2, SamplingParams(), (), 3)
    row = Row(1, 2, 0, ((1,),), True, LogitsAt.LAST, adapter=3)
    with pytest.raises(ValueError, match="adapter 3, which is in no slot"):
        executor.submit(StepPlan(1, 0, rows=(row,), admissions=(admission,))).wait()
    with pytest.raises(ValueError, match="adapter 99, which is not held"):
        executor.submit(StepPlan(1, 0, rows=(row,), adapters_in=(AdapterLoad(99, 0),))).wait()
    executor.close()
