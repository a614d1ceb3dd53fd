"""Steps that are booked in a short way, because they are like the one before, are booked exactly alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foliolm.ledger.accounts import account, linear_flops, weight_bytes_per_step
from foliolm.ledger.columns import MOST_PENDING, StepColumns
from foliolm.ledger.plan_cost import counts_of_plan
from foliolm.shape.presets import model_preset
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import MS, real_cost, virtual_engine
from support.script import request


@pytest.mark.parametrize("windowed", [False, True])
def test_what_is_predicted_of_a_step_owes_nothing_to_the_step_before(windowed):
    cost = real_cost()
    if windowed:
        cost = replace(cost, model=account(replace(model_preset("qwen3-8b").shape, sliding_window=6)))
    engine, clock = virtual_engine(cost)
    ledger, seen = engine.ledger, []
    record_step = ledger.record

    def record(plan, *rest):
        one = record_step(plan, *rest)
        seen.append((plan, one, ledger.cost))
        if len(seen) == 20:
            faster = replace(cost, bandwidth=2 * cost.bandwidth)
            ledger.use_cost(faster, "calibrated")
        return one

    ledger.record = record
    run_arrivals(
        engine, clock, [Arrival(at * 40 * MS, request(1 + at, 5 + at, 24, arrival=at * 40 * MS)) for at in range(3)]
    )
    steady = 0
    for plan, one, used in seen:
        counts = counts_of_plan(used.model, plan)
        terms = used.terms(counts)
        assert one.terms == tuple(terms.parts().values())
        assert one.predicted_s == terms.total
        work = one.work
        assert work.weight_bytes == weight_bytes_per_step(used.model, counts.new_tokens, True)
        assert work.linear_flops == linear_flops(used.model, counts.new_tokens, counts.sampled)
        assert work.kv_bytes == sum(
            spec.bytes_per_token * context for spec, context in zip(used.model.kv, counts.decode_context, strict=True)
        )
        assert work.decode_flops == used.decode_attention_flops(counts)
        steady += not plan.rows
    assert steady > 20
    assert len({one.num_decodes for _, one, _ in seen}) > 2


def test_columns_are_whole_whenever_they_are_read():
    columns = StepColumns()
    names = ("start", "end", "gap", "time", "tick", "decodes", "prompt_tokens", "prompt_samples", "prompt_rows")
    names += ("chunks", "wait", "skip", "whole", "no_prompts", "decode_s", "decode_mixed_s", "prompt_s", "swap_s")
    count = MOST_PENDING + 70
    for step in range(count):
        values = dict.fromkeys(names, 0) | {"end": 10 * step + 1, "tick": step, "whole": step / 2}
        assert columns.append((), **values) == step
        assert columns.last_end == 10 * step + 1
        if step % 50 == 49:  # forgotten, before and after it was sorted
            if step % 100 == 99:
                assert columns["tick"][-1] == step
            columns.drop_last()
            assert columns.count == step
            assert columns.last_end == 10 * (step - 1) + 1
            columns.append((), **values)
    assert columns["tick"].tolist() == list(range(count))
    assert np.array_equal(columns.seconds("whole"), np.arange(count) / 2)
    columns.clear()
    assert columns.last_end == 10 * (count - 1) + 1
    assert len(columns["tick"]) == 0
