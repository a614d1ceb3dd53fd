"""Siblings and searches in the scheduler: random ones against the memory's content, and their corners by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foliolm.core.errors import QueueFullError, RequestError
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.sampling import BeamSearch, SamplingParams
from support.script import Driver, make_scheduler, token_for
from support.sharing import random_sharing_settings, random_source

SHORTS_TOO = {"long_prefill_token_threshold": 4, "short_prompt_share": 0.5}


def family(first: int, tokens, n: int, output: int = 6, beam: BeamSearch | None = None, **more):
    sampling = SamplingParams(max_tokens=output, beam=beam)
    return [
        EngineRequest(first + place, tuple(tokens), sampling, arrival_ns=first, sibling=place, **more)
        for place in range(n)
    ]


def drive(depth: int = 0, virtual: bool = False, **settings) -> Driver:
    driver = Driver(make_scheduler(**settings), depth, virtual)
    driver.sources = {}
    if not virtual:
        driver.watch_content(driver.sources)
    return driver


def add(driver: Driver, requests) -> None:
    for one in requests:
        driver.scheduler.add(one, driver.now)
        driver.sources[one.request_id] = one
        beam = one.sampling.beam
        if beam is not None:
            driver.candidates[one.request_id] = beam.num_candidates(0)


def random_family(rng: random.Random, first: int, source: EngineRequest, limit: int) -> list[EngineRequest]:
    """Siblings, or the hypotheses of a search, in place of a single request."""
    n = rng.randrange(1, 6)
    if rng.random() < 0.3:
        beam = BeamSearch(n, rng.choice([0.0, 1.0, 2.0]), rng.choice([True, False, "never"]))
        sampling = SamplingParams(max_tokens=rng.randrange(1, limit), beam=beam)
        source = replace(source, sampling=sampling, eos_token_ids=())
    return [replace(source, request_id=first + place, sibling=place) for place in range(n)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_families_in_pools_too_small_read_nobody_elses_kv(depth):
    """Random siblings and searches, aborts, failing steps, resets, both treatments, and steps in flight."""
    rng = random.Random(f"families {depth}")
    steps = copies = forks = preempted = searched = 0
    while steps < 3_000 or min(copies, forks, preempted, searched) <= 25:
        settings = random_sharing_settings(rng)
        settings["enable_prefix_caching"] = rng.random() < 0.7
        settings["block_size"] = rng.choice([2, 4])
        settings["num_blocks"] = max(
            settings["num_blocks"], 2 + -(-settings["max_model_len"] // settings["block_size"])
        )
        scheduler = make_scheduler(groups=rng.choice([1, 1, 2]), **settings)
        config = scheduler.config
        driver = Driver(scheduler, depth)
        driver.sources = {}
        driver.watch_content(driver.sources)
        trunks = [[rng.randrange(4) for _ in range(config.max_model_len)] for _ in range(3)]
        last = 0
        for _ in range(rng.randrange(10, 120)):
            while rng.random() < 0.3:
                source = random_source(rng, last + 1, config, trunks, driver.now)
                members = random_family(rng, last + 1, source, config.max_model_len)
                taken = []
                try:
                    for one in members:
                        add(driver, [one])
                        taken.append(one.request_id)
                except (RequestError, QueueFullError):
                    for rid in taken:
                        driver.abort(rid)
                last += len(members)
            if driver.sources and rng.random() < 0.04:
                driver.abort(rng.choice(list(driver.sources)))
            if driver.flights and rng.random() < 0.01:
                driver.fail()
            if rng.random() < 0.01:
                scheduler.reset_prefix_cache()
            driver.step()
            if rng.random() < 0.3:
                assert scheduler.problems() == []
        for _ in range(20_000):
            if not scheduler.has_work and not driver.flights:
                break
            driver.step()
        assert scheduler.problems() == []
        assert set(driver.finished) == set(driver.sources)
        for rid, source in driver.sources.items():
            produced, reason = driver.outputs[rid], driver.finished[rid].finish_reason
            if source.sampling.beam is not None:
                searched += reason is FinishReason.LENGTH
                assert reason is not FinishReason.LENGTH or produced
                continue
            prompt = len(source.prompt_token_ids)
            assert produced == [token_for(rid, prompt + index) for index in range(len(produced))]
        stats = scheduler.stats()
        assert stats.kv_blocks_shared == stats.kv_unused_tokens == 0
        steps += min(stats.num_steps, 300)  # a few long runs must not stand for many
        copies += stats.copied_blocks
        forks += stats.forked_tokens
        preempted += stats.num_preemptions


@pytest.mark.parametrize("beam", [None, BeamSearch(4)])
def test_in_virtual_time_families_take_the_same_steps(beam):
    counts = []
    for virtual in (False, True):
        driver = drive(virtual=virtual, num_blocks=60, max_model_len=64)
        add(driver, family(1, range(21), 4, 9, beam))
        driver.run()
        assert set(driver.finished) == {1, 2, 3, 4}
        assert all(output.finish_reason is FinishReason.LENGTH for output in driver.finished.values())
        counts.append([(plan.num_rows, plan.num_tokens, plan.num_sampled) for plan in driver.plans])
    assert counts[0] == counts[1]


def test_siblings_wait_for_their_leader_in_no_ones_way():
    driver = drive(num_blocks=100, max_num_batched_tokens=8, max_model_len=64, **SHORTS_TOO)
    add(driver, family(1, range(40), 8))
    add(driver, [replace(one, sampling=SamplingParams(max_tokens=2)) for one in family(50, [7, 8, 9], 1)])
    assert driver.scheduler.stats().num_waiting == 9
    while 50 not in driver.finished:
        driver.step()
    assert not driver.outputs.get(2)
    assert driver.scheduler.stats().num_waiting == 7
    driver.run()
    assert driver.content.computed_tokens == 40 + 8 * 5 + 3 + 1


def test_a_leader_that_ends_before_its_prompt_is_computed_leaves_its_siblings_a_way_of_their_own():
    driver = drive(num_blocks=100, max_num_batched_tokens=8, max_model_len=64)
    add(driver, family(1, range(40), 3))
    driver.step()
    driver.abort(1)
    driver.run()
    assert [len(driver.outputs[rid]) for rid in (2, 3)] == [6, 6]


def test_a_sibling_that_ends_early_is_missed_by_nobody():
    driver = drive(num_blocks=100, max_num_batched_tokens=8, max_model_len=64)
    add(driver, family(1, range(40), 4))
    driver.step()
    driver.abort(3)
    driver.run()
    assert [len(driver.outputs[rid]) for rid in (1, 2, 4)] == [6, 6, 6]
    assert driver.finished[3].finish_reason is FinishReason.ABORT


def test_a_failed_step_ends_all_that_sampled_in_it_and_whole_searches():
    for beam in (None, BeamSearch(3)):
        driver = drive(max_model_len=64)
        add(driver, family(1, range(9), 3, 6, beam))
        driver.flights.append(driver.scheduler.schedule(0))
        driver.content.run(driver.flights[0])
        driver.fail()
        assert {rid: output.finish_reason for rid, output in driver.finished.items()} == dict.fromkeys(
            (1, 2, 3), FinishReason.ERROR
        )
        assert driver.scheduler.problems() == []


def test_a_search_ends_with_any_of_its_hypotheses():
    driver = drive(max_model_len=64)
    add(driver, family(1, range(9), 3, 20, BeamSearch(3)))
    for _ in range(4):
        driver.step()
    driver.abort(2)
    assert set(driver.finished) == {1, 2, 3}
    assert not driver.scheduler.has_work
    assert driver.scheduler.problems() == []
    driver.run()


def test_a_search_keeps_its_seats_and_its_blocks_while_its_prompt_is_computed():
    driver = drive(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, **SHORTS_TOO)
    add(driver, family(1, range(30), 3, 10, BeamSearch(3)))
    driver.step()
    add(driver, family(10, [1, 2, 3], 1, 20))
    add(driver, family(11, [4, 5, 6], 1, 20))
    driver.step()
    assert driver.scheduler.stats().num_running == 2
    wait = [one for one in driver.plans[-1].decisions if one.request_id == 11]
    assert [(one.reason, one.needed, one.available) for one in wait] == [("sequences", 1, 0)]
    driver.run()
    assert len(driver.outputs[1]) == 10


def test_a_search_that_can_never_fit_is_refused_with_the_sum():
    driver = drive(num_blocks=33, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match=r"2 \+ 3 · 11 = 35 KV blocks, and the pool has 32"):
        add(driver, family(1, range(10), 3, 40, BeamSearch(3)))
    with pytest.raises(RequestError, match="at most 2 sequences"):
        add(drive(max_num_seqs=2), family(1, range(10), 3, 4, BeamSearch(3)))
    with pytest.raises(ValueError, match="a search that is not there"):
        add(driver, family(1, range(10), 3, 4, BeamSearch(3))[1:])


def test_a_parked_sibling_counts_in_the_queue():
    driver = drive(max_queued_requests=2)
    with pytest.raises(QueueFullError):
        add(driver, family(1, range(10), 3))
