"""Timelines: exact nanoseconds in scripted steps, and sums that hold whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foliolm.core.request import FinishReason
from foliolm.core.timeline import PARTS, HttpStamps, RequestTimeline, with_http
from foliolm.ledger.host_link import HostLink
from foliolm.simulate.run import Arrival, SimulationError, run_arrivals
from support.books import MS, NaiveBooks, real_cost, round_cost, virtual_engine
from support.script import request


def timelines(engine, clock, arrivals):
    run = run_arrivals(engine, clock, arrivals)
    assert run.refused == []
    return {record.request_id: record.timeline for record in run.finished}


def test_alone_everything_is_its_own():
    engine, clock = virtual_engine(round_cost())
    # Prompt 4: 1 + 1 + 4 ms; then two decodes of 1 + 1 + 1 ms.
    (line,) = timelines(engine, clock, [Arrival(0, request(1, 4, 3, arrival=0))]).values()
    assert line.parts == (("own_prefill", 6 * MS), ("own_decode", 6 * MS))
    assert (line.start_ns, line.end_ns) == (0, 12 * MS)


def test_a_prompt_among_streams_in_exact_nanoseconds():
    engine, clock = virtual_engine(round_cost())
    arrivals = [Arrival(0, request(1, 4, 4, arrival=0)), Arrival(7 * MS, request(2, 8, 2, arrival=7 * MS))]
    lines = timelines(engine, clock, arrivals)
    # 1: [0,6) prefill 6; [6,9) decode 3; at 9 request 2 (queued at 7) joins: step of 2 rows, 9 tokens: 12 ms, [9,21).
    #    Then a step of two decodes: 5 ms, [21,26). Request 1 has sampled 4, request 2 has sampled 2.
    # Mixed step: 1 alone takes 3 of 12; the rest, 9, is the other's prompt (nobody else decodes).
    # Two decodes: alone 3 of 5; the rest, 2, is the other decode.
    assert dict(lines[1].parts) == {
        "own_prefill": 6 * MS,
        "own_decode": 9 * MS,
        "others_prefill": 9 * MS,
        "others_decode": 2 * MS,
    }
    assert lines[1].prefill_of == ((2, 9 * MS),)
    # 2: [7,9) queued while a step ran; mixed step: alone 1 + 1 + 8 = 10 of 12; the rest is the decode.
    assert dict(lines[2].parts) == {
        "queue:step_in_flight": 2 * MS,
        "own_prefill": 10 * MS,
        "own_decode": 3 * MS,
        "others_decode": 4 * MS,
    }


def test_host_time_between_steps_is_host():
    engine, clock = virtual_engine(round_cost(), host_s=0.25e-3)
    (line,) = timelines(engine, clock, [Arrival(0, request(1, 4, 3, arrival=0))]).values()
    assert dict(line.parts) == {"host": 750_000, "own_prefill": 6 * MS, "own_decode": 6 * MS}


def test_waiting_has_its_reason():
    engine, clock = virtual_engine(round_cost(), max_num_seqs=1)
    lines = timelines(engine, clock, [Arrival(0, request(rid, 4, 3, arrival=0)) for rid in (1, 2)])
    # Request 1's last token is planned at 9 ms and frees its place: 2's prompt shares that step of 8 ms.
    assert dict(lines[2].parts) == {
        "queue:sequences": 9 * MS,
        "own_prefill": 6 * MS,
        "own_decode": 6 * MS,
        "others_decode": 2 * MS,
    }


def test_a_running_request_left_out_of_a_step_books_it_as_skipped():
    engine, clock = virtual_engine(round_cost(), mode="prefill-first")
    arrivals = [Arrival(0, request(1, 4, 3, arrival=0)), Arrival(1, request(2, 8, 2, arrival=1))]
    lines = timelines(engine, clock, arrivals)
    # [0,6) prompt 1; [6,16) prompt 2 alone; [16,21) two decodes; [21,24) request 1 alone.
    assert dict(lines[1].parts) == {
        "own_prefill": 6 * MS,
        "own_decode": 6 * MS,
        "others_decode": 2 * MS,
        "skipped:prefill_first": 10 * MS,
    }


def test_a_partial_prompt_without_budget_is_skipped_with_the_reason():
    engine, clock = virtual_engine(round_cost(), max_num_batched_tokens=8)
    arrivals = [Arrival(0, request(rid, 6, 1, arrival=rid)) for rid in (1, 2, 3)]
    lines = timelines(engine, clock, arrivals)
    # [0,11): 1 whole, 2's first 2 tokens. [11,22): 2's other 4, 3's first 4. [22,26): 3's last 2.
    assert dict(lines[3].parts)["queue:token_budget"] == 11 * MS - 3 + 3
    assert sum(lines[3].by_kind().values()) == lines[3].total_ns


def test_preemption_and_recompute_have_parts_of_their_own():
    # 6 usable blocks of 4: two requests of 8 + 9 tokens need 5 each.
    engine, clock = virtual_engine(round_cost(), num_blocks=7)
    lines = timelines(engine, clock, [Arrival(0, request(rid, 8, 9, arrival=rid)) for rid in (1, 2)])
    parts = lines[2].by_kind()
    assert parts["preempted"] > 0
    assert parts["recompute"] > 0
    assert lines[1].by_kind().get("preempted", 0) == 0
    for line in lines.values():
        assert sum(ns for _, ns in line.parts) == line.total_ns


def test_an_abort_with_its_step_in_flight_splits_the_time_so_far():
    engine, clock = virtual_engine(round_cost(), depth=1)
    engine.add([request(1, 4, 30, arrival=0)])
    engine.step()
    engine.step()  # prompt committed at 6 ms, a decode in flight
    clock.advance_to(8 * MS)
    engine.abort([1])
    (record,) = engine.take_finished()
    assert record.finish_reason is FinishReason.ABORT
    assert dict(record.timeline.parts) == {"own_prefill": 6 * MS, "own_decode": 2 * MS}


def test_the_http_side_is_added_and_the_sum_stays_exact():
    inside = RequestTimeline(100, 1000, (("http", 400), ("own_decode", 500)))
    whole = with_http(inside, HttpStamps(100, 150, 1040, 30, 1100))
    assert dict(whole.parts) == {"http": 250 + 40 + 30, "text": 150 + 30, "own_decode": 500}
    assert sum(ns for _, ns in whole.parts) == whole.total_ns == 1000


@st.composite
def workloads(draw):
    count = draw(st.integers(1, 8))
    arrivals = []
    for rid in range(1, count + 1):
        at = draw(st.integers(0, 60)) * MS
        life = draw(st.none() | st.integers(1, 120))
        prompt, output = draw(st.integers(1, 24)), draw(st.integers(1, 20))
        arrivals.append(
            Arrival(
                at, request(rid, prompt, output, arrival=at - 7 if at else 0), None if life is None else at + life * MS
            )
        )
    shape = draw(
        st.sampled_from(
            [
                {"num_blocks": 12},
                {"num_blocks": 16, "max_num_batched_tokens": 9},
                {"num_blocks": 16, "mode": "prefill-first"},
                {"num_blocks": 14, "mode": "static"},
                {"num_blocks": 33, "max_num_seqs": 2},
            ]
        )
    )
    return arrivals, {**shape, "depth": draw(st.sampled_from([0, 1, 2])), "host_s": draw(st.sampled_from([0.0, 3e-4]))}


@given(workloads())
@settings(max_examples=120)
def test_parts_sum_to_the_whole_and_agree_with_the_naive_books(case):
    arrivals, shape = case
    cost = round_cost(layer_s=1e-5, prefix_reads=1.0)
    engine, clock = virtual_engine(cost, **shape)
    naive = NaiveBooks(cost)
    book = engine.ledger._timelines.book
    committed = []

    def watch(plan, time_ns, now, terms=None):
        before = committed[-1][1] if committed else 0
        naive.book(plan, now - min(now, max(now - time_ns, before)))
        committed.append((plan, now))
        book(plan, time_ns, now, terms)

    engine.ledger._timelines.book = watch
    run = run_arrivals(engine, clock, arrivals)
    assert len(run.finished) == len(arrivals)
    for record in run.finished:
        line = record.timeline
        assert sum(ns for _, ns in line.parts) == line.total_ns
        assert all(ns > 0 for _, ns in line.parts)
        assert {name.partition(":")[0] for name, _ in line.parts} <= set(PARTS)
        if record.finish_reason is FinishReason.LENGTH:
            assert line.end_ns == record.stamps.last_token_ns
            assert record.num_output_tokens == record.max_tokens
            parts, expected = line.by_kind(), naive.parts[record.request_id]
            near = pytest.approx
            assert parts.get("own_decode", 0) == near(expected["own_decode"], abs=len(committed))
            own = parts.get("own_prefill", 0) + parts.get("recompute", 0)
            assert own == near(expected["own_prefill"], abs=len(committed))
            assert parts.get("others_prefill", 0) == near(expected["others_prefill"], abs=2 * len(committed))
            assert parts.get("others_decode", 0) == near(expected["others_decode"], abs=2 * len(committed))


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma-3-27b-it", "qwen3-30b-a3b"])
def test_windows_and_experts_split_as_the_step_cost_says(model):
    cost = real_cost(model)
    settings = {"num_blocks": 2000, "max_model_len": 4096, "max_num_batched_tokens": 512, "block_size": 16}
    engine, clock = virtual_engine(cost, **settings)
    naive = NaiveBooks(cost)
    book = engine.ledger._timelines.book
    engine.ledger._timelines.book = lambda plan, time_ns, now, terms=None: (
        naive.book(plan, time_ns),
        book(plan, time_ns, now, terms),
    )
    arrivals = [Arrival(rid * 20 * MS, request(rid, 300 * rid, 20, arrival=rid)) for rid in range(1, 6)]
    for record in run_arrivals(engine, clock, arrivals).finished:
        parts, expected = record.timeline.by_kind(), naive.parts[record.request_id]
        for name in ("own_prefill", "own_decode", "others_prefill", "others_decode"):
            assert parts.get(name, 0) == pytest.approx(expected[name], rel=1e-6, abs=200)


def test_books_stay_exact_when_old_steps_are_forgotten(monkeypatch):
    monkeypatch.setattr("foliolm.ledger.timelines.MOST_STEPS", 5)
    engine, clock = virtual_engine(round_cost(), num_blocks=12)
    arrivals = [Arrival(rid * MS, request(rid, 9, 20, arrival=rid)) for rid in range(1, 5)]
    few = timelines(engine, clock, arrivals)
    monkeypatch.setattr("foliolm.ledger.timelines.MOST_STEPS", 4096)
    engine, clock = virtual_engine(round_cost(), num_blocks=12)
    assert few == timelines(engine, clock, arrivals)


def test_a_failed_step_is_booked_as_a_step():
    engine, clock = virtual_engine(round_cost())
    submit = engine.executor.submit

    def failing(plan):
        handle = submit(plan)
        if plan.step_id == 2:
            handle.wait()
            raise RuntimeError("kernel exploded")
        return handle

    engine.executor.submit = failing
    with pytest.raises(SimulationError, match="request 1"):
        run_arrivals(engine, clock, [Arrival(0, request(1, 4, 3, arrival=0))])
    (record,) = engine.ledger.requests
    assert dict(record.timeline.parts) == {"own_prefill": 6 * MS, "own_decode": 3 * MS}


def test_swaps_are_named_and_the_parts_still_sum_to_the_whole():
    """Two streams outgrow the pool: the second moves to the host and back, and its timeline says how long that took."""
    cost = replace(round_cost(), host_link=HostLink(1e6, efficiency=1.0, copy_s=0.0, copies_per_block=1))
    config = {"num_blocks": 6, "max_model_len": 20, "num_host_blocks": 16, "preemption_mode": "swap"}
    engine, _ = virtual_engine(cost, **config)
    plans = []
    submit = engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(plan), submit(plan))[1]
    engine.add([request(rid, 8, 12, arrival=0) for rid in (1, 2)])
    while engine.has_work:
        engine.step()
    records = {record.request_id: record for record in engine.take_finished()}
    notes = {note.blocks_out > 0: note for plan in plans for note in plan.swapped}
    way = {out: round(1e9 * note.num_bytes / 1e6) for out, note in notes.items()}
    assert way[True] == way[False] > 0
    for record in records.values():
        timeline = record.timeline
        assert sum(value for _, value in timeline.parts) == timeline.total_ns
        parts = timeline.by_kind()
        # The first ran in the step that moved the second's KV away, and had ended when that came back.
        moves = way[True] + (way[False] if record.request_id == 2 else 0)
        assert parts["swap"] == pytest.approx(moves, abs=10)
        assert "recompute" not in parts
    assert records[2].timeline.by_kind()["preempted"] > 0
