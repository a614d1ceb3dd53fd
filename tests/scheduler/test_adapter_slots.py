"""Adapters and their slots: who runs beside whom, who is passed over and how long at most, and what is copied."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foliolm.core.adapter import AdapterLoad
from foliolm.core.plan import DecisionKind
from support.script import Driver, MadePrices, make_scheduler, request

SECOND = 1_000_000_000


def driver(**settings) -> Driver:
    return Driver(make_scheduler(**{"num_blocks": 200, "max_num_seqs": 16, **settings}))


def adapted(rid: int, adapter: int | None, output: int = 4, prompt: int = 5, arrival: int | None = None):
    return replace(request(rid, prompt, output, arrival), adapter=adapter)


def running(plan) -> set[int]:
    return {rows.load_id for rows in plan.adapters}


def skips(plan) -> dict[int, str]:
    return {one.request_id: one.reason for one in plan.decisions if one.kind is DecisionKind.SKIP}


def test_a_step_holds_at_most_so_many_adapters_and_the_bare_model_beside_them():
    one = driver(max_loras=2)
    for rid, adapter in enumerate([1, 2, 3, None, 1, 3, 2, None], start=1):
        one.scheduler.add(adapted(rid, adapter), 0)
    plan = one.step()
    assert running(plan) == {1, 2}
    assert skips(plan) == {3: "adapter_slots", 6: "adapter_slots"}
    assert {row.request_id for row in plan.rows} == {1, 2, 4, 5, 7, 8}
    assert plan.adapters_in == (AdapterLoad(1, 0), AdapterLoad(2, 1))
    one.run()
    assert len(one.finished) == 8
    loads = [load for plan in one.plans for load in plan.adapters_in]
    assert [load.load_id for load in loads] == [1, 2, 3]


def test_counts_of_rows_tokens_and_samples_are_those_of_the_plan():
    one = driver(max_loras=4, max_num_batched_tokens=16)
    for rid, adapter in enumerate([1, None, 2, 1], start=1):
        one.scheduler.add(adapted(rid, adapter, output=6, prompt=9), 0)
    adapters = {1: 1, 2: None, 3: 2, 4: 1}
    one.run()
    for plan in one.plans:
        counted: dict[int, list[int]] = {}
        for row in plan.all_rows():
            adapter = adapters[row.request_id]
            if adapter is not None:
                mine = counted.setdefault(adapter, [0, 0, 0])
                mine[0] += row.num_new_tokens
                mine[1] += bool(row.logits)
                mine[2] += 1
        assert {rows.load_id: [rows.tokens, rows.sampled, rows.rows] for rows in plan.adapters} == counted


def test_the_least_recently_used_of_the_idle_ones_gives_its_slot():
    one = driver(max_loras=2, max_num_seqs=1, max_num_batched_tokens=64)
    for rid, adapter in enumerate([1, 2, 1, 3, 1, 2], start=1):
        one.scheduler.add(adapted(rid, adapter), 0)
    one.run()
    loads = [load for plan in one.plans for load in plan.adapters_in]
    assert loads == [AdapterLoad(1, 0), AdapterLoad(2, 1), AdapterLoad(3, 1), AdapterLoad(2, 1)]


def feed(one: Driver, steps: int, every: int = 3) -> int | None:
    """Requests of adapters 1 and 2 keep coming, overlapping, beside one of adapter 3; the step at which it starts."""
    one.scheduler.add(adapted(1, 1, output=8), 0)
    one.scheduler.add(adapted(2, 2, output=8), 0)
    one.scheduler.add(adapted(3, 3, output=2), 0)
    for index in range(steps):
        if index % every == 0:
            for adapter in (1, 2):
                rid = 10 + 2 * index + adapter
                one.scheduler.add(adapted(rid, adapter, output=8, arrival=index + 5), one.now)
        plan = one.step()
        assert one.scheduler.problems() == []
        if 3 in running(plan):
            return index
    return None


def test_an_age_bound_drains_a_slot_for_whoever_is_passed_over():
    """Two streams of requests that overlap for ever hold both slots; the third adapter waits no longer than the bound,
    and until the last of one adapter's running requests has ended."""
    assert feed(driver(max_loras=2, age_bound_s=1e6), 200) is None
    one = driver(max_loras=2, age_bound_s=20 / SECOND)
    started = feed(one, 200)
    assert started is not None
    assert 20 <= started <= 20 + 12
    reasons = {reason for plan in one.plans for reason in skips(plan).values()}
    assert reasons == {"adapter_slots", "adapter_drain"}
    one.run()


def test_whoever_was_waited_for_may_be_gone():
    one = driver(max_loras=2, age_bound_s=5 / SECOND)
    for rid, adapter in ((1, 1), (2, 2), (3, 3)):
        one.scheduler.add(adapted(rid, adapter, output=30), 0)
    for _ in range(8):
        one.step()
    one.scheduler.add(adapted(4, 1, output=2, arrival=9), one.now)
    assert skips(one.step())[4] == "adapter_drain"
    one.abort(3)
    assert 4 in {row.request_id for row in one.step().rows}
    one.run()


@pytest.mark.parametrize("prices", [None, MadePrices(1.0)])
def test_grouping_by_cost_brings_fewer_adapters_into_a_step(prices):
    """Four places, twelve adapters in turn: in order of arrival each row has its own."""
    distinct = {}
    for grouping in ("arrival", "cost"):
        one = driver(max_loras=8, max_num_seqs=4, lora_grouping=grouping, prices=prices, age_bound_s=1e6)
        for rid in range(48):
            one.scheduler.add(adapted(rid + 1, 1 + rid % 12, output=4 + rid % 3), 0)
        one.run()
        assert len(one.finished) == 48
        steps = [len(plan.adapters) for plan in one.plans if plan.num_rows]
        distinct[grouping] = sum(steps) / len(steps)
    assert distinct["cost"] < 0.7 * distinct["arrival"]


def test_by_cost_the_age_bound_holds():
    one = driver(max_loras=2, max_num_seqs=2, lora_grouping="cost", age_bound_s=30 / SECOND)
    one.scheduler.add(adapted(1, 1, output=6), 0)
    one.scheduler.add(adapted(2, 2, output=6), 0)
    for index in range(60):
        one.scheduler.add(adapted(10 + index, 1, output=6, arrival=index + 3), one.now)
        if 2 in running(one.step()):
            break
    assert index <= 40


def test_an_adapter_whose_copy_failed_is_copied_again():
    one = driver(max_loras=2)
    one.depth = 1
    one.scheduler.add(adapted(1, 1, output=6), 0)
    one.step()
    one.step()  # the first is committed now, the second in flight: fail the oldest that is left
    one.fail()
    one.scheduler.add(adapted(2, 1), one.now)
    one.run()
    loads = [load for plan in one.plans for load in plan.adapters_in]
    assert loads == [AdapterLoad(1, 0)]  # that copy had come to its end
    two = driver(max_loras=2)
    two.depth = 1
    two.scheduler.add(adapted(1, 1, output=6), 0)
    two.step()
    two.fail()
    two.scheduler.add(adapted(2, 1), two.now)
    two.run()
    loads = [load for plan in two.plans for load in plan.adapters_in]
    assert loads == [AdapterLoad(1, 0), AdapterLoad(1, 0)]


def test_an_unloaded_adapter_leaves_its_slot():
    one = driver(max_loras=2)
    one.scheduler.add(adapted(1, 1), 0)
    one.run()
    assert one.scheduler.adapters.resident == (1,)
    one.scheduler.adapters.forget(1)
    one.scheduler.add(adapted(2, None), one.now)
    one.run()
    assert [plan.adapters_out for plan in one.plans if plan.adapters_out] == [(1,)]
    assert one.scheduler.adapters.resident == ()


@pytest.mark.parametrize("seed", range(6))
def test_random_runs_keep_the_books(seed):
    """Arrivals, aborts, preemptions, forks and failures at random: the invariants hold, and all end."""
    draw = random.Random(seed)
    one = driver(
        max_loras=draw.choice([1, 2, 3]),
        num_blocks=draw.choice([24, 40]),
        max_num_seqs=draw.choice([3, 8]),
        lora_grouping=draw.choice(["arrival", "cost"]),
        enable_prefix_caching=draw.random() < 0.5,
        age_bound_s=draw.choice([10, 1e9]) / SECOND,
        scheduling_policy=draw.choice(["fcfs", "prefix"]) if seed % 2 else "fcfs",
    )
    one.depth = draw.choice([0, 1])
    rid = 0
    for _ in range(150):
        if draw.random() < 0.4:
            rid += 1
            adapter = draw.choice([None, 1, 2, 3, 4, 5])
            count = draw.choice([1, 1, 3])
            for sibling in range(count):
                source = adapted(rid + sibling, adapter, draw.randint(1, 9), draw.randint(1, 20), arrival=rid)
                one.scheduler.add(replace(source, sibling=sibling), one.now)
            rid += count - 1
        if draw.random() < 0.05 and rid:
            one.abort(draw.randint(1, rid))
        if draw.random() < 0.03 and one.flights:
            one.fail()
        plan = one.step()
        assert one.scheduler.problems() == []
        assert len(running(plan)) <= one.scheduler.config.max_loras
    one.run()
    assert one.scheduler.adapters.running == one.scheduler.adapters.waiting == ()
