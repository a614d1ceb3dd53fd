"""Traps that other schedulers and KV managers fell into, each by the name of what it guards."""

from __future__ import annotations

import pytest

from foliolm.core.config import EngineConfig
from foliolm.core.errors import ConfigError, QueueFullError, RequestError
from foliolm.core.plan import Closed, DecisionKind, LogitsAt
from foliolm.core.resolve import resolve_limits
from foliolm.core.result import StepResult, StepSeconds
from foliolm.kv import NULL_BLOCK
from support.script import Driver, make_scheduler, request, result_for


def pressed(depth: int = 0, **settings) -> Driver:
    """Two requests whose growth outruns a pool of five blocks of four."""
    driver = Driver(make_scheduler(**{"num_blocks": 6, "max_model_len": 20, **settings}), depth)
    for rid in (1, 2):
        driver.scheduler.add(request(rid, prompt=8, output=12), 0)
    return driver


# --- ownership


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_finish_abort_and_preemption_in_one_step_free_once(depth):
    driver = pressed(depth)
    driver.step()
    driver.step()
    for rid in (1, 2, 2, 1):
        driver.abort(rid)
        assert driver.scheduler.problems() == []
    driver.run()
    assert driver.scheduler.stats().kv_blocks_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_read_by_a_step_in_flight_is_not_handed_out(depth):
    driver = Driver(make_scheduler(num_blocks=9, max_model_len=32), depth)
    driver.scheduler.add(request(1, prompt=28, output=3), 0)
    driver.step()
    driver.abort(1)  # its prompt is in flight
    driver.scheduler.add(request(2, prompt=28, output=2), 0)
    plan = driver.scheduler.schedule(1)
    assert plan.num_rows == 0
    assert plan.closed is Closed.KV
    while driver.flights:
        driver.commit()
    assert driver.scheduler.schedule(2).num_rows == 1


def test_the_null_block_is_never_handed_out():
    driver = Driver(make_scheduler(num_blocks=9, max_model_len=32))
    for rid in range(1, 9):
        driver.scheduler.add(request(rid, prompt=3, output=1), 0)
    plan = driver.step()
    assert sorted(block for row in plan.rows for block in row.new_blocks[0]) == list(range(1, 9))
    assert NULL_BLOCK == 0


def test_everything_is_free_when_nobody_lives():
    driver = pressed()
    driver.run()
    assert driver.scheduler.problems() == []
    assert driver.scheduler.stats().kv_blocks_used == 0


# --- admission and preemption


def test_what_can_never_fit_is_refused_with_the_sum_and_blocks_nobody():
    scheduler = make_scheduler(num_blocks=6, max_model_len=64)
    with pytest.raises(RequestError, match=r"ceil\(21/4\) = 6 KV blocks, and the pool has 5 \(20 tokens\)") as caught:
        scheduler.add(request(1, prompt=20, output=1), 0)
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match=r"70 tokens.*model length of 64"):
        scheduler.add(request(2, prompt=70, output=1), 0)
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(request(3, prompt=0, output=1), 0)
    driver = Driver(scheduler)
    scheduler.add(request(4, prompt=19, output=1), 0)
    driver.run()
    assert list(driver.finished) == [4]


def test_one_that_outgrows_the_pool_alone_ends_with_length_and_is_never_preempted():
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=64))
    driver.scheduler.add(request(1, prompt=10, output=50), 0)
    assert driver.run() <= 12
    assert driver.finished[1].finish_reason == "length"
    assert len(driver.outputs[1]) == 10
    assert driver.scheduler.stats().num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted():
    driver = pressed()
    driver.step()
    driver.scheduler.add(request(3, prompt=1, output=1), 0)
    plan = driver.step()
    assert plan.preempted == (2,)
    assert plan.admissions == ()


def test_a_watermark_larger_than_the_pool_deadlocks_nobody():
    driver = pressed(watermark_blocks=50)
    driver.run()
    assert len(driver.outputs[1]) == len(driver.outputs[2]) == 12


def test_a_preempted_request_resumes_without_emitting_a_token_twice():
    driver = pressed()
    driver.run()
    assert driver.scheduler.stats().num_preemptions >= 1
    for rid in (1, 2):
        assert len(driver.outputs[rid]) == 12
    assert driver.finished[2].stamps.num_preemptions >= 1
    assert driver.finished[2].stamps.first_token_ns == 1, "its first token came before it was preempted"
    assert driver.finished[2].stamps.admitted_ns == 1, "it was admitted before it was preempted"


def test_the_oldest_is_never_a_victim():
    driver = Driver(make_scheduler(num_blocks=9, max_model_len=32, max_num_seqs=8))
    for rid in range(1, 9):
        driver.scheduler.add(request(rid, prompt=3, output=20), 0)
    driver.run()
    victims = {rid for plan in driver.plans for rid in plan.preempted}
    assert victims
    alive: set[int] = set()
    for plan in driver.plans:
        for victim in plan.preempted:
            assert victim != min(alive), "the first in order gave way"
        alive |= {note.request_id for note in plan.admissions}
        alive -= set(plan.preempted) | {rid for rid in plan.released if rid in driver.finished}


def test_no_request_is_preempted_twice_without_a_new_token():
    driver = Driver(make_scheduler(num_blocks=13, max_model_len=48, max_num_seqs=6))
    for rid in range(1, 7):
        driver.scheduler.add(request(rid, prompt=6, output=30), 0)
    driver.run()
    resumed: dict[int, int] = {}
    for plan in driver.plans:
        for note in plan.admissions:
            assert len(note.token_ids) > resumed.get(note.request_id, 0), "came back with no more than it had"
            resumed[note.request_id] = len(note.token_ids)


def test_decodes_are_never_starved_by_prompts():
    for mode in ("chunked", "mixed", "prefill-first"):
        driver = Driver(make_scheduler(mode=mode, max_num_batched_tokens=72, num_blocks=200))
        driver.scheduler.add(request(1, prompt=4, output=8), 0)
        driver.step()
        rid = 1
        for _ in range(250):  # an endless supply of prompts that end at once
            if 1 in driver.finished:
                break
            rid += 1
            driver.scheduler.add(request(rid, prompt=60, output=1), driver.now)
            driver.step()
        assert 1 in driver.finished, mode


def test_a_long_prompt_is_never_starved_by_short_ones():
    driver = Driver(
        make_scheduler(
            num_blocks=40,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            long_prefill_token_threshold=8,
            short_prompt_share=0.5,
        )
    )
    driver.scheduler.add(request(1, prompt=60, output=2), 0)
    driver.scheduler.add(request(2, prompt=60, output=2), 1)
    rid = 2
    for _ in range(400):
        if 1 in driver.finished and 2 in driver.finished:
            break
        rid += 1
        driver.scheduler.add(request(rid, prompt=7, output=9), driver.now + 2)
        driver.step()
    assert {1, 2} <= set(driver.finished)


# --- budget and chunking


def test_a_chunk_that_is_not_the_last_samples_nothing():
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.scheduler.add(request(1, prompt=20, output=1), 0)
    plans = [driver.step() for _ in range(3)]
    assert [bool(plan.rows[0].logits & LogitsAt.LAST) for plan in plans] == [False, False, True]
    assert driver.outputs[1] != []


def test_a_budget_of_one_token_still_gets_on():
    driver = Driver(make_scheduler(max_num_batched_tokens=1, max_num_seqs=1, short_prompt_share=0.9))
    driver.scheduler.add(request(1, prompt=5, output=3), 0)
    assert driver.run() == 7


def test_a_budget_below_the_sequences_is_refused():
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 8, below --max-num-seqs 16"):
        resolve_limits(EngineConfig(max_num_batched_tokens=8, max_num_seqs=16), 4096)
    with pytest.raises(ValueError, match="max_num_seqs is 16"):
        make_scheduler(max_num_batched_tokens=8, max_num_seqs=16)


# --- life cycle


def test_a_full_queue_turns_away_and_harms_nobody():
    driver = Driver(make_scheduler(max_queued_requests=2, max_num_seqs=1))
    driver.scheduler.add(request(1, prompt=2, output=2), 0)
    driver.scheduler.add(request(2, prompt=2, output=2), 0)
    with pytest.raises(QueueFullError, match="2 requests are waiting; the limit is 2"):
        driver.scheduler.add(request(3, prompt=2, output=2), 0)
    driver.run()
    assert set(driver.finished) == {1, 2}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("after", range(8))
def test_an_abort_in_any_state_frees_and_drops_what_is_in_flight(depth, after):
    driver = Driver(make_scheduler(num_blocks=7, max_model_len=24, max_num_batched_tokens=8), depth)
    for rid in (1, 2, 3):
        driver.scheduler.add(request(rid, prompt=8, output=8), 0)
    for _ in range(after):
        driver.step()
    for rid in (3, 2):
        driver.abort(rid)
        assert driver.scheduler.abort(rid, 0) is None, "a second abort is a no-op"
    driver.run()
    assert len(driver.outputs[1]) == 8
    assert driver.finished[2].finish_reason == driver.finished[3].finish_reason == "abort"
    assert driver.scheduler.stats().kv_blocks_used == 0


def test_an_unknown_abort_is_a_no_op():
    assert make_scheduler().abort(99, 0) is None


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_raises_ends_its_requests_alone(depth):
    driver = Driver(make_scheduler(max_num_seqs=2), depth)
    for rid in (1, 2, 3):
        driver.scheduler.add(request(rid, prompt=4, output=6), 0)
    plan = driver.scheduler.schedule(1)
    driver.take(driver.scheduler.fail(plan, "boom", 1))
    assert {rid: output.error for rid, output in driver.finished.items()} == {1: "boom", 2: "boom"}
    driver.run()
    assert len(driver.outputs[3]) == 6


def test_a_row_that_fails_ends_alone():
    driver = Driver(make_scheduler())
    for rid in (1, 2):
        driver.scheduler.add(request(rid, prompt=4, output=6), 0)
    driver.step()
    plan = driver.scheduler.schedule(2)
    result = result_for(plan)
    driver.take(
        driver.scheduler.commit(
            plan, StepResult(plan.step_id, result.tokens, StepSeconds(0.0), errors={1: "bad row"}), 2
        )
    )
    assert driver.finished[2].error == "bad row"
    driver.run()
    assert len(driver.outputs[1]) == 6


def test_results_out_of_order_or_of_another_size_are_refused():
    driver = Driver(make_scheduler())
    driver.scheduler.add(request(1, prompt=4, output=6), 0)
    plan = driver.scheduler.schedule(1)
    later = driver.scheduler.schedule(2)
    with pytest.raises(ValueError, match="oldest step in flight is 1"):
        driver.scheduler.commit(later, result_for(later), 3)
    with pytest.raises(ValueError, match="1 rows, its result has 0"):
        driver.scheduler.commit(plan, StepResult(plan.step_id, [], StepSeconds(0.0)), 3)


def test_ids_in_use_and_undivided_siblings_are_refused():
    scheduler = make_scheduler()
    scheduler.add(request(1, prompt=4, output=6), 0)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request(1, prompt=4, output=6), 0)
    with pytest.raises(ValueError, match="n=2"):
        scheduler.add(request(2, prompt=4, output=6, n=2), 0)


def test_prompt_logprobs_are_delivered_once_across_chunks_and_preemptions():
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=20, max_num_batched_tokens=4, max_num_seqs=4))
    driver.scheduler.add(request(1, prompt=4, output=14), 0)
    driver.step()
    driver.scheduler.add(request(2, prompt=10, output=3, prompt_logprobs=0), 0)
    seen: list[int | None] = []
    for _ in range(200):
        if not driver.scheduler.has_work:
            break
        plan = driver.scheduler.schedule(driver.now)
        wanted = {}
        for index, row in enumerate(plan.rows, len(plan.decodes)):
            if row.logits & LogitsAt.ALL:
                first = 0 if row.context == 0 else row.context + 1
                last = min(row.context + row.num_new_tokens, 9)
                wanted[index] = [None if position == 0 else position for position in range(first, last + 1)]
        outputs = driver.scheduler.commit(
            plan, StepResult(plan.step_id, result_for(plan).tokens, StepSeconds(0.0), prompt_logprobs=wanted), 0
        )
        for output in outputs:
            seen += output.prompt_logprobs
        driver.take(outputs)
    assert seen == [None, *range(1, 10)]
    assert driver.scheduler.stats().num_preemptions >= 1


def test_every_wait_has_a_reason():
    driver = Driver(make_scheduler(num_blocks=9, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=8))
    for rid in range(1, 12):
        driver.scheduler.add(request(rid, prompt=6, output=12), 0)
    reasons = set()
    while driver.scheduler.has_work:
        waiting = driver.scheduler.stats().num_waiting
        plan = driver.step()
        held = [d for d in plan.decisions if d.kind is DecisionKind.WAIT]
        if waiting and not plan.admissions and driver.scheduler.stats().num_waiting:
            assert held, "somebody waits and nobody says why"
            assert plan.closed is not Closed.EMPTY
        reasons |= {decision.reason for decision in held}
    assert {"kv_blocks", "preempted_this_step"} <= reasons
