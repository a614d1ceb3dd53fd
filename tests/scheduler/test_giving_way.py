"""Giving way: who, how, with what reason, and that nothing is lost on the way to the host and back."""

from __future__ import annotations

import pytest

from foliolm.core.plan import DecisionKind
from support.script import Driver, MadePrices, make_scheduler, request


def pressed(depth: int = 0, count: int = 2, prompt: int = 8, output: int = 12, **settings) -> Driver:
    """Requests whose growth outruns a pool of five blocks of four; swaps unless the settings say otherwise."""
    chosen = {"num_blocks": 6, "max_model_len": 20, "num_host_blocks": 16, "preemption_mode": "swap", **settings}
    driver = Driver(make_scheduler(**chosen), depth)
    sources = {rid: request(rid, prompt=prompt, output=output) for rid in range(1, count + 1)}
    driver.watch_content(sources)
    for source in sources.values():
        driver.scheduler.add(source, 0)
    return driver


def preemptions(driver: Driver):
    return [d for plan in driver.plans for d in plan.decisions if d.kind is DecisionKind.PREEMPT]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_swapped_request_goes_on_where_it_was(depth):
    driver = pressed(depth)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_swaps == stats.num_preemptions > 0
    assert stats.recomputed_tokens == 0
    assert stats.swap_out_bytes == stats.swap_in_bytes > 0
    assert stats.host_blocks_used == 0
    # Two prompts, then a token a step each: nothing was computed twice.
    assert driver.content.computed_tokens == 2 * (8 + 11)
    assert [len(driver.outputs[rid]) for rid in (1, 2)] == [12, 12]
    assert {d.reason for d in preemptions(driver)} == {"swap"}


def test_the_plan_says_whose_blocks_move_and_how_many_bytes():
    driver = pressed()
    driver.run()
    out, back = (note for plan in driver.plans for note in plan.swapped)
    assert (out.request_id, out.blocks_out, out.blocks_in) == (2, 2, 0)
    assert (back.request_id, back.blocks_out, back.blocks_in) == (2, 0, 2)
    assert out.num_bytes == back.num_bytes == 2 * 4 * 8
    admitted = [d for plan in driver.plans for d in plan.decisions if d.kind is DecisionKind.ADMIT]
    assert [d.reason for d in admitted] == ["fits", "fits", "swapped_in"]


def test_a_prompt_that_gives_way_half_done_keeps_its_half():
    driver = pressed(count=0, max_num_batched_tokens=4, num_blocks=9, max_model_len=32, max_num_seqs=4)
    sources = {1: request(1, prompt=4, output=20), 2: request(2, prompt=24, output=2)}
    driver.watch_content(sources)
    for source in sources.values():
        driver.scheduler.add(source, 0)
    driver.run()
    assert driver.scheduler.stats().num_swaps > 0
    assert driver.content.computed_tokens == (4 + 19) + (24 + 1)


def test_a_full_host_pool_falls_back_to_recompute_and_says_so():
    driver = pressed(num_host_blocks=1)
    driver.run()
    assert {d.reason for d in preemptions(driver)} == {"host_full"}
    assert driver.scheduler.stats().recomputed_tokens > 0
    assert [len(driver.outputs[rid]) for rid in (1, 2)] == [12, 12]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("after", range(12))
def test_an_abort_frees_the_host_too(depth, after):
    driver = pressed(depth)
    for _ in range(after):
        driver.step()
    driver.abort(2)
    assert driver.scheduler.problems() == []
    driver.run()
    assert driver.scheduler.stats().host_blocks_used == 0
    assert len(driver.outputs[1]) == 12


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_a_failed_step_was_to_move_is_computed_again(depth):
    """The step that carries the copies raises: who ran in it ends, who was on the way to the host does not."""
    driver = pressed(depth, num_blocks=9, count=3, max_model_len=32)
    for _ in range(40):
        driver.step()
        if any(note.blocks_out for plan in driver.flights for note in plan.swapped):
            break
        if depth == 0:  # commit by hand from here on
            plan = driver.scheduler.schedule(driver.now)
            driver.content.run(plan)
            driver.flights.append(plan)
            if any(note.blocks_out for note in plan.swapped):
                break
            driver.commit()
    while not any(note.blocks_out for note in driver.flights[0].swapped):
        driver.commit()
    (victim,) = (note.request_id for note in driver.flights[0].swapped if note.blocks_out)
    driver.fail()
    assert victim not in driver.finished
    driver.run()
    assert driver.finished[victim].finish_reason == "length"
    assert driver.scheduler.stats().recomputed_tokens > 0


def test_the_swapped_come_back_before_new_ones_are_admitted():
    driver = pressed()
    driver.content = None
    while not preemptions(driver):
        driver.step()
    # It arrived before them all, as far as its stamp says, and one block would do for it.
    driver.scheduler.add(request(9, prompt=1, output=1, arrival=-1), driver.now)
    before = len(driver.plans)
    driver.run()
    admitted = [note.request_id for plan in driver.plans[before:] for note in plan.admissions]
    assert admitted == [2, 9]


def test_blocks_that_others_share_are_not_copied():
    driver = pressed(count=0, num_blocks=8, max_model_len=28, enable_prefix_caching=True)
    sources = {rid: request(rid, prompt=9, output=14) for rid in (1, 2)}
    driver.watch_content(sources)
    driver.scheduler.add(sources[1], 0)
    driver.step()
    driver.scheduler.add(sources[2], 0)  # shares two full blocks of eight tokens
    driver.run()
    out = [note for plan in driver.plans for note in plan.swapped if note.blocks_out]
    assert out
    assert all(note.request_id == 2 for note in out)
    first = next(plan for plan in driver.plans if plan.swapped)
    held = -(-(9 + sum(2 in p.decodes.request_ids for p in driver.plans if p.step_id < first.step_id)) // 4)
    assert out[0].blocks_out == held - 2
    assert driver.scheduler.stats().recomputed_tokens == 0
    # Eight tokens of the second prompt were shared, and nothing was computed twice.
    assert driver.content.computed_tokens == 2 * (9 + 13) - 8


@pytest.mark.parametrize(("swap_s", "reason"), [(1.0, "swap"), (100.0, "recompute")])
def test_auto_takes_the_cheaper_and_states_both_costs(swap_s, reason):
    driver = pressed(preemption_mode="auto", prices=MadePrices(swap_s))
    driver.run()
    first = preemptions(driver)[0]
    assert first.reason == reason
    costs = dict(first.predicted_s)
    assert costs["swap"] == swap_s * 2
    assert costs["recompute"] == 8.0
    assert (first.needed, first.available, first.blocker) == (2, 1, 1)


def test_auto_without_a_cost_model_recomputes():
    driver = pressed(preemption_mode="auto")
    driver.run()
    assert {d.reason for d in preemptions(driver)} == {"recompute"}


def victims(policy: str, prices=None) -> list[int]:
    driver = Driver(
        make_scheduler(
            num_blocks=17,
            max_model_len=64,
            max_num_seqs=4,
            preemption_victim=policy,
            preemption_mode="recompute",
            prices=prices,
        )
    )
    for rid, prompt in enumerate((12, 20, 4, 12), 1):
        driver.scheduler.add(request(rid, prompt=prompt, output=30), 0)
    while not (found := preemptions(driver)):
        driver.step()
    return [d.request_id for d in found[:1]]


def test_who_gives_way_follows_the_policy():
    assert victims("last") == [4]
    assert victims("least-computed") == [3]
    # The price of a token is the same for all: what counts is the tokens lost for each block that becomes free.
    assert victims("auto", MadePrices(1.0)) in ([2], [3], [4])
    assert victims("auto") == [4], "without a cost model the last gives way"


def test_auto_never_asks_somebody_more_important():
    driver = Driver(
        make_scheduler(
            num_blocks=17,
            max_model_len=64,
            preemption_victim="auto",
            scheduling_policy="priority",
            prices=MadePrices(1.0),
        )
    )
    for rid, (prompt, priority) in enumerate(((12, 0), (4, 0), (20, 1), (12, 1)), 1):
        driver.scheduler.add(request(rid, prompt=prompt, output=20, priority=priority), 0)
    driver.run()
    asked = [d.request_id for d in preemptions(driver)]
    assert asked[0] in (3, 4)


def test_one_that_gave_way_often_is_spared_while_another_can():
    driver = Driver(make_scheduler(num_blocks=13, max_model_len=48, max_num_seqs=6, max_preemptions=1))
    for rid in range(1, 7):
        driver.scheduler.add(request(rid, prompt=6, output=30), 0)
    driver.run()
    often = [driver.finished[rid].stamps.num_preemptions for rid in range(1, 7)]
    assert sum(often) >= 5
    assert max(often) <= min(o for o in often[1:]) + 2, often
