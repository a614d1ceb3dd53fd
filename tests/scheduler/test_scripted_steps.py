"""Scripted steps: what runs, in which blocks, and with which reason, written out by hand."""

from __future__ import annotations

from foliolm.core.plan import Closed, DecisionKind, LogitsAt
from foliolm.scheduler import ALL_DECODES
from support.script import Driver, make_scheduler, request


def rows(plan):
    """(request, context, new tokens, samples) by row."""
    return [(r.request_id, r.context, r.num_new_tokens, bool(r.logits & LogitsAt.LAST)) for r in plan.all_rows()]


def decisions(plan):
    return [(d.kind, d.request_id, d.reason) for d in plan.decisions]


def test_one_request_from_arrival_to_end():
    driver = Driver(make_scheduler())
    driver.scheduler.add(request(1, prompt=6, output=4), 0)
    first = driver.step()
    assert rows(first) == [(1, 0, 6, True)]
    assert first.rows[0].new_blocks == ((1, 2),)
    assert first.rows[0].whole_table
    assert first.admissions[0].token_ids == tuple(range(1000, 1006))
    assert decisions(first) == [(DecisionKind.ADMIT, 1, "fits")]
    assert first.closed is Closed.EMPTY
    second = driver.step()
    assert rows(second) == [(1, 6, 1, True)]
    assert second.decodes.grown == ()
    third = driver.step()
    assert rows(third) == [(1, 7, 1, True)]
    fourth = driver.step()  # position 8 is the first of a third block
    assert rows(fourth) == [(1, 8, 1, True)]
    assert fourth.decodes.grown == ((1, ((3,),)),)
    assert driver.finished[1].finish_reason == "length"
    assert len(driver.outputs[1]) == 4
    assert not driver.scheduler.has_work
    assert driver.scheduler.problems() == []
    idle = driver.step()
    assert idle.num_rows == 0


def test_chunks_fill_the_budget_beside_decodes_and_only_the_last_samples():
    driver = Driver(make_scheduler(max_num_batched_tokens=10))
    driver.scheduler.add(request(1, prompt=4, output=20), 0)
    driver.step()
    driver.scheduler.add(request(2, prompt=21, output=5), 0)
    assert rows(driver.step()) == [(1, 4, 1, True), (2, 0, 9, False)]
    plan = driver.step()
    assert rows(plan) == [(1, 5, 1, True), (2, 9, 9, False)]
    assert plan.closed is Closed.TOKENS
    assert plan.rows[0].new_blocks == ()
    assert rows(driver.step()) == [(1, 6, 1, True), (2, 18, 3, True)]
    assert rows(driver.step()) == [(1, 7, 1, True), (2, 21, 1, True)]


def test_a_share_of_the_budget_is_kept_for_short_prompts_behind_a_long_one():
    driver = Driver(make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=8, short_prompt_share=0.25))
    driver.scheduler.add(request(1, prompt=60, output=2), 0)
    assert rows(driver.step()) == [(1, 0, 16, False)]  # nobody short: the long one has it all
    driver.scheduler.add(request(2, prompt=3, output=2), 0)
    assert rows(driver.step()) == [(1, 16, 13, False), (2, 0, 3, True)]
    assert rows(driver.step()) == [(2, 3, 1, True), (1, 29, 15, False)]


def test_a_second_long_prompt_waits_and_short_ones_pass_it():
    driver = Driver(make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=8, short_prompt_share=0.25))
    for rid, prompt in ((1, 40), (2, 40), (3, 4)):
        driver.scheduler.add(request(rid, prompt=prompt, output=1), 0)
    plan = driver.step()
    assert rows(plan) == [(1, 0, 12, False), (3, 0, 4, True)]
    assert (DecisionKind.WAIT, 2, "token_budget") in decisions(plan)
    driver.run()
    assert set(driver.finished) == {1, 2, 3}


def test_admission_counts_the_whole_prompt_not_its_first_chunk():
    driver = Driver(make_scheduler(num_blocks=11, max_model_len=40, max_num_batched_tokens=8))
    driver.scheduler.add(request(1, prompt=24, output=2), 0)
    driver.step()
    driver.scheduler.add(request(2, prompt=20, output=2), 0)
    plan = driver.step()
    assert [row.request_id for row in plan.rows] == [1]
    wait = next(d for d in plan.decisions if d.request_id == 2)
    assert (wait.kind, wait.reason, wait.needed, wait.available, wait.blocker) == (
        DecisionKind.WAIT,
        "kv_blocks",
        5,
        4,
        1,
    )


def test_want_of_kv_stops_those_behind():
    driver = Driver(make_scheduler(num_blocks=11, max_model_len=40))
    driver.scheduler.add(request(1, prompt=24, output=4), 0)
    driver.step()
    driver.scheduler.add(request(2, prompt=30, output=2), 0)
    driver.scheduler.add(request(3, prompt=2, output=2), 0)
    plan = driver.step()
    assert plan.closed is Closed.KV
    assert rows(plan) == [(1, 24, 1, True)]


def test_sequences_close_the_budget():
    driver = Driver(make_scheduler(max_num_seqs=2))
    for rid in (1, 2, 3):
        driver.scheduler.add(request(rid, prompt=2, output=3), 0)
    plan = driver.step()
    assert [row.request_id for row in plan.rows] == [1, 2]
    assert plan.closed is Closed.SEQUENCES
    assert decisions(plan)[-1] == (DecisionKind.WAIT, 3, "sequences")


def test_the_watermark_counts_only_while_something_runs():
    driver = Driver(make_scheduler(num_blocks=11, max_model_len=40, watermark_blocks=2))
    driver.scheduler.add(request(1, prompt=40 - 1, output=1), 0)
    assert rows(driver.step()) == [(1, 0, 39, True)]  # takes the whole pool: nobody is there to protect
    driver.scheduler.add(request(2, prompt=4, output=9), 0)
    driver.step()
    driver.scheduler.add(request(3, prompt=32, output=2), 0)
    wait = driver.step().decisions[-1]
    assert (wait.reason, wait.needed, wait.available) == ("kv_blocks", 10, 8)


def test_the_newest_gives_way_and_comes_back_with_all_its_tokens():
    # Two requests of 8 tokens fill 4 blocks; the fifth is free, the sixth does not exist.
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=20))
    driver.scheduler.add(request(1, prompt=8, output=8), 0)
    driver.scheduler.add(request(2, prompt=8, output=8), 0)
    driver.step()
    plan = driver.step()  # both cross into a third block, one is free: request 2 gives way
    assert rows(plan) == [(1, 8, 1, True)]
    assert plan.preempted == (2,)
    preempt = next(d for d in plan.decisions if d.kind is DecisionKind.PREEMPT)
    assert (preempt.request_id, preempt.needed, preempt.available, preempt.blocker) == (2, 2, 1, 1)
    assert (DecisionKind.WAIT, 2, "preempted_this_step") in decisions(plan)
    assert plan.closed is Closed.KV
    while 1 not in driver.finished:
        assert driver.step().num_rows == 1
    plan = driver.step()
    assert rows(plan) == [(2, 0, 9, True)]
    assert plan.admissions[0].num_prompt_tokens == 8
    assert plan.admissions[0].token_ids[8:] == tuple(driver.outputs[2][:1])
    assert 1 in plan.released
    assert plan.rows[0].whole_table
    driver.run()
    assert len(driver.outputs[2]) == 8
    assert driver.finished[2].stamps.num_preemptions == 1


def test_a_preempted_request_keeps_its_place_in_the_queue():
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=20))
    driver.scheduler.add(request(1, prompt=8, output=8), 0)
    driver.scheduler.add(request(2, prompt=8, output=8), 0)
    driver.step()
    driver.scheduler.add(request(3, prompt=4, output=2), 0)
    driver.step()
    order = [row.request_id for plan in [driver.step() for _ in range(30)] for row in plan.rows]
    assert order == [2, 3]


def test_priority_runs_the_lower_first_and_preempts_the_higher():
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=20, scheduling_policy="priority", max_num_seqs=2))
    driver.scheduler.add(request(1, prompt=8, output=8, priority=5), 0)
    driver.scheduler.add(request(2, prompt=8, output=8, priority=1), 0)
    driver.scheduler.add(request(3, prompt=1, output=1, priority=9), 0)
    assert [row.request_id for row in driver.step().rows] == [2, 1]
    assert driver.step().preempted == (1,)
    driver.run()
    admitted = [note.request_id for plan in driver.plans for note in plan.admissions]
    assert admitted == [2, 1, 1, 3]


def test_fcfs_ignores_priority():
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.scheduler.add(request(1, prompt=2, output=1, priority=5), 0)
    driver.scheduler.add(request(2, prompt=2, output=1, priority=1), 0)
    driver.run()
    assert list(driver.finished) == [1, 2]


def test_end_tokens_end_and_min_tokens_holds_them_back():
    from support.script import token_for

    end = token_for(1, 7)
    for min_tokens, expected in ((0, 3), (3, 6)):
        driver = Driver(make_scheduler())
        driver.scheduler.add(request(1, prompt=5, output=6, eos=(end,), min_tokens=min_tokens), 0)
        driver.run()
        assert len(driver.outputs[1]) == expected
    driver = Driver(make_scheduler())
    driver.scheduler.add(request(1, prompt=5, output=6, eos=(end,), ignore_eos=True), 0)
    driver.run()
    assert driver.finished[1].finish_reason == "length"
    driver = Driver(make_scheduler())
    driver.scheduler.add(request(1, prompt=5, output=6, stop_token_ids=(end,), ignore_eos=True), 0)
    driver.run()
    assert (driver.finished[1].finish_reason, driver.finished[1].stop_reason) == ("stop", end)


def test_a_step_in_flight_is_planned_past_and_its_surplus_dropped():
    from support.script import token_for

    driver = Driver(make_scheduler(), depth=1)
    driver.scheduler.add(request(1, prompt=4, output=9, eos=(token_for(1, 5),)), 0)
    assert driver.step().pending_step is None
    plan = driver.step()
    assert rows(plan) == [(1, 4, 1, True)]
    assert plan.pending_step == 1
    plan = driver.step()  # planned before the end token of the step before is known
    assert rows(plan) == [(1, 5, 1, True)]
    assert driver.finished[1].finish_reason == "stop"
    stats = driver.scheduler.stats()
    assert stats.num_running == 0
    assert driver.scheduler._state.kv.num_fenced == 2  # the surplus row still reads them
    assert driver.step().num_rows == 0
    assert driver.outputs[1] == [token_for(1, 4), token_for(1, 5)]
    assert driver.scheduler.problems() == []
    assert driver.scheduler._state.kv.num_fenced == 0


def test_nobody_is_planned_past_the_last_token_it_may_have():
    driver = Driver(make_scheduler(), depth=2)
    driver.scheduler.add(request(1, prompt=4, output=3), 0)
    plans = [driver.step() for _ in range(6)]
    assert [plan.num_rows for plan in plans] == [1, 1, 1, 0, 0, 0]


def test_at_depth_one_growth_waits_for_the_fence_of_its_victim():
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=20), depth=1)
    driver.scheduler.add(request(1, prompt=8, output=8), 0)
    driver.scheduler.add(request(2, prompt=8, output=8), 0)
    driver.step()
    plan = driver.step()
    # Request 2's blocks are still being read by the step in flight, but one block is free: that is enough for 1.
    assert rows(plan) == [(1, 8, 1, True)]
    assert driver.scheduler._state.kv.num_fenced == 0  # the first step has landed by now
    driver.run()
    assert len(driver.outputs[2]) == 8


def test_versions_change_exactly_when_membership_does():
    driver = Driver(make_scheduler())
    driver.scheduler.add(request(1, prompt=4, output=9), 0)
    driver.scheduler.add(request(2, prompt=4, output=4), 0)
    driver.step()
    versions = [driver.step().decodes.version for _ in range(5)]
    assert versions[0] == versions[1] == versions[2]
    assert versions[3] != versions[2]
    assert versions[4] == versions[3]


def test_context_tokens_is_the_sum_of_contexts():
    driver = Driver(make_scheduler())
    for rid in range(1, 6):
        driver.scheduler.add(request(rid, prompt=rid * 3, output=rid + 2), 0)
    for _ in range(10):
        plan = driver.step()
        decodes = list(plan.all_rows())[: len(plan.decodes)]
        assert plan.decodes.context_tokens == sum(row.context for row in decodes)


def test_a_fence_that_will_give_the_blocks_spares_a_second_victim():
    # Three requests of two blocks and a pool of six: all cross at once, nothing is free, and a step is in flight.
    driver = Driver(make_scheduler(num_blocks=7, max_model_len=24), depth=1)
    for rid in (1, 2, 3):
        driver.scheduler.add(request(rid, prompt=8, output=6), 0)
    driver.step()
    plan = driver.step()
    assert plan.num_rows == 0
    assert [(d.kind, d.request_id, d.reason) for d in plan.decisions] == [
        (DecisionKind.PREEMPT, 3, "recompute"),
        (DecisionKind.SKIP, ALL_DECODES, "fence"),
    ]
    plan = driver.step()
    assert rows(plan) == [(1, 8, 1, True), (2, 8, 1, True)]
    assert plan.preempted == (3,)
    assert driver.scheduler.stats().num_preemptions == 1
    assert driver.scheduler.stats().recomputed_tokens == 8
    driver.run()
    assert [len(driver.outputs[rid]) for rid in (1, 2, 3)] == [6, 6, 6]
