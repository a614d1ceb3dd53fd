"""Shared prefixes: what is found, what it saves, and that nobody ever reads another's KV."""

from __future__ import annotations

import random

import pytest

from foliolm.core.errors import RequestError
from foliolm.core.plan import DecisionKind
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from support.script import Driver, make_scheduler, request, token_for
from support.sharing import random_sharing_settings, random_source


def prompt_request(rid: int, tokens, output: int = 2, **more) -> EngineRequest:
    sampling = SamplingParams(max_tokens=output, prompt_logprobs=more.pop("prompt_logprobs", None))
    return EngineRequest(rid, tuple(tokens), sampling, arrival_ns=rid, **more)


def sharing(**settings) -> Driver:
    driver = Driver(make_scheduler(enable_prefix_caching=True, **settings))
    driver.sources = {}
    driver.watch_content(driver.sources)
    return driver


def serve(driver: Driver, source: EngineRequest) -> int:
    """Serve a request to its end; returns its cached tokens."""
    driver.sources[source.request_id] = source
    driver.scheduler.add(source, driver.now)
    driver.run()
    return driver.finished[source.request_id].stamps.num_cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_whole_hit_leaves_at_least_one_token_to_compute(length, cached):
    driver = sharing()
    assert serve(driver, prompt_request(1, range(length))) == 0
    assert serve(driver, prompt_request(2, range(length))) == cached
    assert len(driver.outputs[2]) == 2


def test_only_what_stands_at_the_same_place_after_the_same_tokens_is_shared():
    driver = sharing()
    serve(driver, prompt_request(1, [1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert serve(driver, prompt_request(2, [2, 2, 2, 2, 1, 1, 1, 1, 3])) == 0
    assert serve(driver, prompt_request(3, [1, 1, 1, 1, 9, 2, 2, 2, 3])) == 4
    assert serve(driver, prompt_request(4, [1, 1, 1, 1, 2, 2, 2, 2, 4])) == 8


def test_salt_and_adapter_keep_prefixes_apart():
    driver = sharing()
    tokens = range(20)
    assert serve(driver, prompt_request(1, tokens)) == 0
    assert serve(driver, prompt_request(2, tokens, cache_salt="a")) == 0
    assert serve(driver, prompt_request(3, tokens, adapter=7)) == 0
    assert serve(driver, prompt_request(4, tokens, cache_salt="a")) == 16
    assert serve(driver, prompt_request(5, tokens, adapter=7)) == 16
    assert serve(driver, prompt_request(6, tokens, adapter=8)) == 0


def test_one_without_identity_neither_takes_nor_gives():
    driver = sharing()
    assert serve(driver, prompt_request(1, range(20), share_prefix=False)) == 0
    assert serve(driver, prompt_request(2, range(20))) == 0
    assert serve(driver, prompt_request(3, range(20), share_prefix=False)) == 0
    assert driver.scheduler.stats().prefix_queries == 20


def test_prompt_logprobs_read_no_cache_but_fill_it():
    driver = sharing()
    assert serve(driver, prompt_request(1, range(20))) == 0
    assert serve(driver, prompt_request(2, range(20), prompt_logprobs=1)) == 0
    assert serve(driver, prompt_request(3, range(30, 50), prompt_logprobs=1)) == 0
    assert serve(driver, prompt_request(4, range(30, 50))) == 16


def test_generated_tokens_are_shared_too():
    driver = sharing()
    serve(driver, prompt_request(1, range(10), output=11))
    history = [*range(10), *driver.outputs[1]]
    # The last token's KV was never written: of 21 tokens, 20 are computed.
    assert serve(driver, prompt_request(2, [*history, 5, 6, 7])) == 20


def test_idle_prefixes_give_way_before_anybody_is_preempted_oldest_and_tail_first():
    driver = sharing(num_blocks=11, max_model_len=40)
    serve(driver, prompt_request(1, range(100, 113)))
    serve(driver, prompt_request(2, range(200, 213)))
    assert driver.scheduler.stats().kv_blocks_idle == 6
    serve(driver, prompt_request(3, range(300, 322)))  # six blocks: four are empty, two must give way
    assert driver.scheduler.stats().evicted_blocks == 2
    evict = [d for plan in driver.plans for d in plan.decisions if d.kind is DecisionKind.EVICT]
    assert sum(decision.needed for decision in evict) == 2
    assert driver.scheduler.stats().num_preemptions == 0
    assert serve(driver, prompt_request(4, range(200, 213))) == 12
    assert serve(driver, prompt_request(5, range(100, 113))) == 4


def test_a_match_does_not_evict_itself():
    driver = sharing(num_blocks=7, max_model_len=24)
    serve(driver, prompt_request(1, range(13)))
    # Three idle blocks are its prefix, and it needs all of the pool.
    assert serve(driver, prompt_request(2, [*range(12), *range(50, 60)])) == 12


def test_matched_idle_blocks_count_as_room_that_is_needed():
    driver = sharing(num_blocks=8, max_model_len=28)
    serve(driver, prompt_request(1, range(13)))
    running = prompt_request(2, range(500, 512), output=8)
    waiting = prompt_request(3, [*range(12), *range(600, 608)])
    for source in (running, waiting):
        driver.sources[source.request_id] = source
        driver.scheduler.add(source, driver.now)
    plan = driver.step()  # seven blocks: three for 2; 3 would share three idle ones and need two more
    assert [note.request_id for note in plan.admissions] == [2]
    wait = next(d for d in plan.decisions if d.request_id == 3)
    assert (wait.reason, wait.needed, wait.available) == ("kv_blocks", 5, 4)
    driver.run()


def test_requests_that_arrive_together_compute_their_common_prefix_once():
    driver = sharing(num_blocks=200, max_model_len=128, max_num_batched_tokens=32)
    for rid in range(1, 9):
        source = prompt_request(rid, [*range(64), 1000 + rid, 2000 + rid])
        driver.sources[rid] = source
        driver.scheduler.add(source, 0)
    driver.run()
    prompts = sum(row.num_new_tokens for plan in driver.plans for row in plan.rows)
    assert prompts == 64 + 8 * 2
    skips = [d for plan in driver.plans for d in plan.decisions if d.reason == "prefix_in_flight"]
    assert skips
    assert {skip.blocker for skip in skips} == {1}


def test_nobody_waits_for_a_promise_of_its_own():
    """Preempted while its prompt is in flight, a request has promised what it then needs itself."""
    driver = Driver(make_scheduler(enable_prefix_caching=True, num_blocks=4, block_size=2, max_model_len=6), depth=1)
    for rid in (1, 2):
        driver.scheduler.add(prompt_request(rid, range(rid * 10, rid * 10 + 2), output=4), 0)
    driver.run(100)
    assert driver.scheduler.stats().num_preemptions > 0
    assert [len(driver.outputs[rid]) for rid in (1, 2)] == [4, 4]


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_those_who_wait_for_a_prefix_go_on_when_its_owner_is_gone(end):
    driver = sharing(num_blocks=200, max_model_len=128, max_num_batched_tokens=16)
    for rid in (1, 2):
        source = prompt_request(rid, [*range(64), rid])
        driver.sources[rid] = source
        driver.scheduler.add(source, 0)
    driver.step()
    if end == "abort":
        driver.abort(1)
    else:
        driver.flights.append(driver.scheduler.schedule(driver.now))
        driver.content.run(driver.flights[0])
        driver.fail()
    driver.run()
    assert len(driver.outputs[2]) == 2
    assert driver.scheduler._state.promises._owners == {}


def test_what_a_failed_step_wrote_is_not_published():
    driver = sharing(max_num_batched_tokens=64)
    source = prompt_request(1, range(20))
    driver.sources[1] = source
    driver.scheduler.add(source, 0)
    plan = driver.scheduler.schedule(0)
    driver.take(driver.scheduler.fail(plan, "boom", 0))
    assert driver.scheduler.stats().kv_blocks_idle == 0
    assert serve(driver, prompt_request(2, range(20))) == 0


def test_hits_count_first_admissions_only():
    driver = sharing(num_blocks=6, max_model_len=20)
    for rid in (1, 2):
        source = prompt_request(rid, range(rid * 100, rid * 100 + 8), output=12)
        driver.sources[rid] = source
        driver.scheduler.add(source, 0)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_queries == 16
    assert stats.prefix_hits == 0
    assert all(output.stamps.num_cached_tokens == 0 for output in driver.finished.values())


def test_a_reset_forgets_everything_and_harms_nobody():
    driver = sharing()
    serve(driver, prompt_request(1, range(20)))
    source = prompt_request(2, [*range(20), 77], output=20)
    driver.sources[2] = source
    driver.scheduler.add(source, driver.now)
    driver.step()
    assert driver.scheduler.reset_prefix_cache() > 0
    assert driver.scheduler.problems() == []
    assert driver.scheduler.stats().kv_blocks_idle == 0
    driver.run()
    assert len(driver.outputs[2]) == 20
    assert serve(driver, prompt_request(3, [*range(20), 77])) == 20  # published anew by those who still held it


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nobody_ever_reads_anothers_kv(depth):
    """Random prompts with common beginnings, pools too small, aborts, failing steps, resets and steps in flight."""
    rng = random.Random(f"content {depth}")
    steps = hits = evicted = preempted = swapped = 0
    while steps < 9_000:
        scheduler = make_scheduler(groups=rng.choice([1, 1, 2]), **random_sharing_settings(rng))
        config = scheduler.config
        driver = Driver(scheduler, depth)
        sources: dict[int, EngineRequest] = {}
        driver.watch_content(sources)
        trunks = [[rng.randrange(4) for _ in range(config.max_model_len)] for _ in range(3)]
        for _ in range(rng.randrange(10, 150)):
            while rng.random() < 0.4:
                rid = len(sources) + 1
                source = random_source(rng, rid, config, trunks, driver.now)
                try:
                    scheduler.add(source, driver.now)
                except RequestError:
                    break
                sources[rid] = source
            if sources and rng.random() < 0.05:
                driver.abort(rng.choice(list(sources)))
            if driver.flights and rng.random() < 0.01:
                driver.fail()
            if rng.random() < 0.01:
                scheduler.reset_prefix_cache()
            driver.step()
            if rng.random() < 0.2:
                assert scheduler.problems() == []
        for _ in range(20_000):
            if not scheduler.has_work and not driver.flights:
                break
            driver.step()
        assert scheduler.problems() == []
        assert set(driver.finished) == set(sources)
        for rid, source in sources.items():
            prompt = len(source.prompt_token_ids)
            produced = driver.outputs[rid]
            assert produced == [token_for(rid, prompt + index) for index in range(len(produced))]
            if driver.finished[rid].finish_reason == "length":
                pool = (config.num_blocks - 1) * config.block_size
                limit = min(config.max_model_len, pool, prompt + source.sampling.max_tokens)
                assert len(produced) == limit - prompt
        stats = scheduler.stats()
        steps += stats.num_steps
        hits += stats.prefix_hits
        evicted += stats.evicted_blocks
        preempted += stats.num_preemptions - stats.num_swaps
        swapped += stats.num_swaps
    assert min(hits, evicted) > 200 and preempted > 100 and swapped > 20, "the cases were too easy"


def test_sharing_saves_work_and_changes_no_token():
    rng = random.Random("saves")
    trunk = [rng.randrange(100) for _ in range(40)]
    results = {}
    for caching in (False, True):
        driver = Driver(make_scheduler(num_blocks=120, max_model_len=64, enable_prefix_caching=caching))
        sources: dict[int, EngineRequest] = {}
        driver.watch_content(sources)
        for rid in range(1, 25):
            sources[rid] = prompt_request(rid, [*trunk, rid, rid + 1], output=5)
            driver.scheduler.add(sources[rid], driver.now)
            driver.step()
        driver.run()
        results[caching] = (driver.outputs, driver.content.computed_tokens)
    assert results[True][0] == results[False][0]
    assert results[True][1] < results[False][1] / 3


def test_fcfs_order_is_kept_among_those_who_do_not_wait_for_a_prefix():
    driver = sharing(num_blocks=60, max_num_seqs=1)
    for rid in range(1, 6):
        driver.sources[rid] = request(rid, 8, 2)
        driver.scheduler.add(driver.sources[rid], 0)
    driver.run()
    assert list(driver.finished) == [1, 2, 3, 4, 5]
