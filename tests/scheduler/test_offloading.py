"""Evicted prefixes on the host: what is copied and why, that it comes back, and that a failure loses nothing else."""

from __future__ import annotations

import pytest

from foliolm.core.plan import NOBODY, DecisionKind
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from support.script import Driver, MadePrices, make_scheduler, token_for

CHEAP, DEAR = MadePrices(0.5), MadePrices(1000.0)


def offloading(depth: int = 0, **settings) -> Driver:
    """A pool of eight blocks of four, and a host pool."""
    chosen = {
        "num_blocks": 9,
        "max_model_len": 32,
        "enable_prefix_caching": True,
        "num_host_blocks": 32,
        "preemption_mode": "swap",
        "kv_offloading": "auto",
        "prices": CHEAP,
        **settings,
    }
    driver = Driver(make_scheduler(**chosen), depth)
    driver.sources = {}
    driver.watch_content(driver.sources)
    return driver


def asked(rid: int, first: int, length: int = 17, output: int = 2, **more) -> EngineRequest:
    """A prompt of its own kind: ``first`` says which."""
    return EngineRequest(
        rid, tuple(range(first, first + length)), SamplingParams(max_tokens=output), arrival_ns=rid, **more
    )


def serve(driver: Driver, source: EngineRequest) -> int:
    """Serve a request to its end; returns its cached tokens."""
    begin(driver, source)
    driver.run()
    return driver.finished[source.request_id].stamps.num_cached_tokens


def begin(driver: Driver, source: EngineRequest) -> None:
    driver.sources[source.request_id] = source
    driver.scheduler.add(source, driver.now)


def decisions(driver: Driver, reason: str):
    return [one for plan in driver.plans for one in plan.decisions if one.reason == reason]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_evicted_prefix_comes_back_by_a_copy(depth, groups):
    driver = offloading(depth, groups=groups)
    assert serve(driver, asked(1, 1000)) == 0
    assert serve(driver, asked(2, 2000, length=25)) == 0  # pushes the first out, but for a block
    computed = driver.content.computed_tokens
    assert serve(driver, asked(3, 1000)) == 16
    assert driver.content.computed_tokens - computed == 17 - 16 + 1
    stats = driver.scheduler.stats()
    assert stats.prefix_hits == 16
    assert stats.host_hits == 4 * stats.loaded_blocks > 0
    assert stats.offloaded_blocks == stats.evicted_blocks > 0
    assert stats.host_blocks_used == 0 < stats.host_blocks_cached


def test_the_plan_says_what_moves_and_at_what_price():
    driver = offloading()
    serve(driver, asked(1, 1000))
    serve(driver, asked(2, 2000, length=25))
    serve(driver, asked(3, 1000))
    (back,) = (note for plan in driver.plans for note in plan.swapped if note.blocks_in)
    out = [note for plan in driver.plans for note in plan.swapped if note.blocks_out]
    assert {note.request_id for note in out} == {NOBODY}
    assert back.request_id == 3
    assert back.num_bytes == back.blocks_in * 4 * 8
    (admitted,) = decisions(driver, "prefix_from_host")
    assert admitted.kind is DecisionKind.ADMIT
    costs = dict(admitted.predicted_s)
    # A block costs half a second out and back, a token one second to compute; one token is left in either case.
    assert costs == {"copy": 0.25 * back.blocks_in + 1.0, "compute": 4.0 * back.blocks_in + 1.0}
    kept = decisions(driver, "prefix_to_host")
    assert {one.kind for one in kept} == {DecisionKind.EVICT}
    assert sum(one.needed for one in kept) == driver.scheduler.stats().offloaded_blocks
    for one in kept:
        costs = dict(one.predicted_s)
        assert costs["copy"] <= costs["compute"]
    assert not decisions(driver, "idle_prefixes")


@pytest.mark.parametrize(
    "settings",
    [{"kv_offloading": "off"}, {"num_host_blocks": 0}, {"prices": None}, {"prices": DEAR}],
    ids=["off", "no host pool", "nothing known", "dear"],
)
def test_what_cannot_pay_is_not_copied(settings):
    driver = offloading(**settings)
    for rid, first in enumerate((1000, 2000, 1000), 1):
        assert serve(driver, asked(rid, first, length=29)) == 0
    assert driver.content.swapped_blocks == [0, 0]
    assert decisions(driver, "idle_prefixes")


def test_always_asks_for_no_price():
    driver = offloading(kv_offloading="always", prices=None)
    serve(driver, asked(1, 1000, length=25))
    serve(driver, asked(2, 2000, length=25))
    assert serve(driver, asked(3, 1000, length=25)) == 24


def test_what_is_on_the_host_is_computed_where_that_is_cheaper():
    prices = MadePrices(0.5)
    driver = offloading(prices=prices)
    serve(driver, asked(1, 1000, length=25))
    serve(driver, asked(2, 2000, length=25))
    prices.swap_s = 1000.0
    assert serve(driver, asked(3, 1000, length=25)) <= 8
    (declined,) = (d for d in decisions(driver, "fits") if d.predicted_s)
    costs = dict(declined.predicted_s)
    assert declined.request_id == 3
    assert costs["copy"] > costs["compute"]


def test_copies_stop_where_nothing_is_wanted_again_but_for_a_few():
    """Prompts that never come again: what has been seen of reuse says so once the host pool has been through."""
    driver = offloading(num_host_blocks=8, prices=MadePrices(1.0, token_s=1.0))
    driver.content = None
    moved = []
    for rid in range(1, 300):
        serve(driver, asked(rid, 1000 * rid, length=29))
        moved.append(driver.scheduler.kv_report()["host"]["moved_blocks"])
    evicted = driver.scheduler.stats().evicted_blocks / len(moved)
    assert driver.scheduler.kv_report()["host"]["reuse"] < 1 / 7, "by these prices that is too little"
    assert moved[5] > 4 * evicted
    assert 0 < moved[-1] - moved[-200] < 0.2 * 200 * evicted, "now and then one is tried"


@pytest.mark.parametrize("more", [{"cache_salt": "a"}, {"adapter": 7}])
def test_salt_and_adapter_keep_prefixes_apart_on_the_host_too(more):
    driver = offloading(num_host_blocks=64)
    serve(driver, asked(1, 1000, length=25, **more))
    serve(driver, asked(2, 2000, length=29))
    assert serve(driver, asked(3, 1000, length=25)) == 0
    serve(driver, asked(4, 3000, length=29))
    assert serve(driver, asked(5, 1000, length=25, **more)) == 24
    assert driver.scheduler.stats().host_hits > 0


def test_a_reset_forgets_the_host_too():
    driver = offloading()
    serve(driver, asked(1, 1000, length=25))
    serve(driver, asked(2, 2000, length=25))
    stats = driver.scheduler.stats()
    assert stats.host_blocks_cached > 0
    assert driver.scheduler.reset_prefix_cache() == stats.kv_blocks_idle + stats.host_blocks_cached
    assert driver.scheduler.stats().host_blocks_cached == 0
    assert driver.scheduler.problems() == []
    assert serve(driver, asked(3, 1000, length=25)) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_copy_that_failed_is_not_found(depth):
    """The step that was to copy raises: its own requests end, and the next one computes what was not copied."""
    driver = offloading(depth)
    serve(driver, asked(1, 1000, length=25))
    begin(driver, asked(2, 2000, length=25))
    while not any(note.blocks_out for plan in driver.flights for note in plan.swapped):
        driver.now += 1
        plan = driver.scheduler.schedule(driver.now)
        driver.content.run(plan)
        driver.flights.append(plan)
        if not plan.swapped:
            driver.commit()
    driver.fail()
    assert driver.scheduler.problems() == []
    assert driver.finished[2].finish_reason == "error"
    driver.run()
    computed = driver.content.computed_tokens
    cached = serve(driver, asked(3, 1000, length=25))  # the content model fails where anything wrong is read
    assert driver.content.computed_tokens - computed == 25 - cached + 1
    assert driver.scheduler.stats().host_hits == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_copy_back_that_failed_leaves_the_hosts(depth):
    driver = offloading(depth)
    serve(driver, asked(1, 1000, length=25))
    serve(driver, asked(2, 2000, length=25))
    begin(driver, asked(3, 1000, length=25))
    driver.now += 1
    plan = driver.scheduler.schedule(driver.now)
    assert plan.swaps_in
    driver.content.run(plan)
    driver.flights.append(plan)
    driver.fail()
    assert driver.finished[3].finish_reason == "error"
    driver.run()
    assert serve(driver, asked(4, 1000, length=25)) >= 16


def test_requests_that_give_way_have_the_first_claim_on_the_host():
    driver = offloading(num_host_blocks=6, kv_offloading="always", num_blocks=9)
    for rid in (1, 2):
        serve(driver, asked(rid, 1000 * rid, length=29))
    assert driver.scheduler.stats().host_blocks_cached == 6
    for rid in (3, 4):
        begin(driver, asked(rid, 1000 * rid, length=9, output=16))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_swaps > 0
    assert stats.recomputed_tokens == 0
    for rid in (3, 4):
        assert driver.outputs[rid] == [token_for(rid, 9 + index) for index in range(16)]


@pytest.mark.parametrize("after", range(1, 8))
@pytest.mark.parametrize("depth", [0, 2])
def test_an_abort_while_copies_are_on_their_way_leaves_the_books_right(depth, after):
    driver = offloading(depth)
    serve(driver, asked(1, 1000, length=25))
    serve(driver, asked(2, 2000, length=25))
    begin(driver, asked(3, 1000, length=25, output=4))
    for _ in range(after):
        driver.step()
    driver.abort(3)
    assert driver.scheduler.problems() == []
    driver.run()
    assert serve(driver, asked(4, 1000, length=25)) > 0
