"""A ledger on disk: whole lines whatever happens, rotation, and what is read back."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.errors import ConfigError
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.timeline import HttpStamps
from foliolm.ledger.explain import delivery_s, explain
from foliolm.ledger.gaps import host_gap_s
from foliolm.ledger.journal import Journal
from foliolm.ledger.ledger import prefix_hashes
from foliolm.ledger.lines import HttpLine
from foliolm.ledger.perfetto import trace_events
from foliolm.ledger.reading import newest_run, read_runs
from foliolm.ledger.run_metrics import run_metrics
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import MS, real_cost
from support.script import request

SETTINGS = SchedulerConfig(max_model_len=4096, num_blocks=2000, max_num_batched_tokens=512, max_num_seqs=16)


def written(folder, arrivals=None, settings=SETTINGS, cost=None):
    clock = VirtualClock(1000)
    engine = build_virtual_engine(settings, Books(cost or real_cost(), ledger=str(folder)), clock, host_s=1e-4)
    if arrivals is None:
        arrivals = [
            Arrival(rid * 30 * MS, request(rid, 200 * rid, 20, arrival=rid * 30 * MS - 5)) for rid in range(1, 9)
        ]
    run_arrivals(engine, clock, arrivals)
    engine.close()
    return engine


def test_what_was_kept_in_memory_is_read_back(tmp_path):
    ledger = written(tmp_path).ledger
    run = newest_run(tmp_path)
    assert run.steps == list(ledger.steps)
    assert run.requests == list(ledger.requests)
    assert run.cost == ledger.cost
    assert run.engine.scheduler == SETTINGS
    assert {rid: line.parts for rid, line in run.timelines.items()} == {
        record.request_id: record.timeline.parts for record in ledger.requests
    }


def test_files_rotate_and_each_begins_with_its_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal.__init__, "__defaults__", (8000, 5))
    ledger = written(tmp_path).ledger
    files = sorted(tmp_path.iterdir())
    assert len(files) == 5
    assert all(path.read_bytes().startswith(b'{"kind":"engine"') for path in files)
    (run,) = read_runs(tmp_path)
    assert run.steps == list(ledger.steps)[-len(run.steps) :]
    assert len(run.steps) < len(ledger.steps), "the oldest files were deleted"


def test_a_line_cut_off_by_a_crash_is_left_out_and_said(tmp_path):
    written(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = newest_run(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    run = newest_run(tmp_path)
    assert run.num_torn == 1
    assert len(run.requests) == len(whole.requests) - 1


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path):
    code = (
        "import sys; from pathlib import Path; from foliolm.ledger.journal import Journal;"
        "from foliolm.ledger.lines import HttpLine; from foliolm.core.timeline import HttpStamps;"
        "journal = Journal(Path(sys.argv[1]), 'http'); print('up', flush=True)\n"
        "while True: journal.write(HttpLine(1, 'x' * 3000, HttpStamps(1, 2, 3, 4, 5)))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while sum(path.stat().st_size for path in tmp_path.iterdir()) < 100_000:  # a busy machine may take its time
            time.sleep(0.01)
        process.kill()
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\n")
    assert len(lines) > 10
    assert {len(line) for line in lines[:-1]} == {len(lines[0])}


def test_damage_within_a_file_is_named(tmp_path):
    written(tmp_path)
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:40]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=r"engine-0-000001.jsonl, line 3 is damaged"):
        read_runs(tmp_path)


def test_a_full_disk_does_not_stop_the_engine(tmp_path, monkeypatch, caplog):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("foliolm.ledger.journal.os.write", full)
    engine = written(tmp_path)
    assert len(engine.ledger.requests) == 8
    assert [record.message for record in caplog.records if "No space left" in record.message] != []
    assert len(caplog.records) == 1


def test_an_old_run_in_the_same_folder_stays_apart(tmp_path):
    written(tmp_path)
    time.sleep(0.002)
    clock = VirtualClock(5000)
    engine = build_virtual_engine(SETTINGS, Books(real_cost(), ledger=str(tmp_path)), clock)
    run_arrivals(engine, clock, [Arrival(6000, request(1, 50, 3, arrival=6000))])
    engine.close()
    assert [len(run.requests) for run in read_runs(tmp_path)] == [8, 1]
    assert len(newest_run(tmp_path).requests) == 1


def test_what_the_http_process_saw_is_joined_by_request_and_arrival(tmp_path):
    engine = written(tmp_path)
    record = engine.ledger.requests[0]
    journal = Journal(tmp_path, "http")
    end = record.timeline.end_ns
    stamps = HttpStamps(record.stamps.arrival_ns, 2, end + 100, 30, end + 500)
    journal.write(HttpLine(record.request_id, "a", stamps))
    journal.write(HttpLine(record.request_id, "another life", replace(stamps, arrival_ns=7)))
    journal.close()
    line = newest_run(tmp_path).timelines[record.request_id]
    assert line.end_ns == end + 500
    assert sum(ns for _, ns in line.parts) == line.total_ns
    assert dict(line.parts)["text"] == 2 + 30
    # Of the seven others no process told.
    assert delivery_s(newest_run(tmp_path)) == pytest.approx(0.0)


def test_the_way_of_the_last_token_to_the_socket_is_the_median_one(tmp_path):
    engine = written(tmp_path)
    journal = Journal(tmp_path, "http")
    for record in engine.ledger.requests:
        end = record.timeline.end_ns
        stamps = HttpStamps(record.stamps.arrival_ns, 0, end + 100, 0, end + record.request_id * MS)
        journal.write(HttpLine(record.request_id, "a", stamps))
    journal.close()
    assert delivery_s(newest_run(tmp_path)) == pytest.approx(4.5e-3)


def test_time_without_requests_is_no_gap_between_steps():
    """Also where the next prompt begins behind a prefix that is still cached, or waits for its turn."""
    clock = VirtualClock(1000)
    engine = build_virtual_engine(replace(SETTINGS, enable_prefix_caching=True), Books(real_cost()), clock, host_s=1e-3)
    again = [Arrival(rid * 10_000 * MS, request(rid, 200, 5, arrival=rid)) for rid in range(1, 5)]
    run_arrivals(engine, clock, again)
    steps = list(engine.ledger.steps)
    assert steps[5].rows[0][2] > 0, "the second prompt was to find the first"
    assert host_gap_s(steps) == pytest.approx(1e-3, rel=0.01)


def test_metrics_of_a_run_agree_with_a_count_by_hand(tmp_path):
    engine = written(tmp_path)
    tokens: dict[int, list[int]] = {}
    ids: tuple[int, ...] = ()
    for step in engine.ledger.steps:
        ids = step.decode_ids if step.decode_ids is not None else ids
        for rid in (*ids[: step.num_decodes], *(row[0] for row in step.rows if row[3])):
            tokens.setdefault(rid, []).append(step.end_ns)
    gaps = sorted((b - a) / 1e9 for times in tokens.values() for a, b in itertools.pairwise(times))
    metrics = run_metrics(list(engine.ledger.steps), engine.ledger.requests)
    assert {rid: len(times) for rid, times in tokens.items()} == dict.fromkeys(range(1, 9), 20)
    assert metrics.itl_max == pytest.approx(gaps[-1])
    assert metrics.itl_p50 == pytest.approx(gaps[(len(gaps) + 1) // 2 - 1])
    ttft = [tokens[rid][0] - (rid * 30 * MS - 5) for rid in tokens]
    assert metrics.ttft_mean == pytest.approx(sum(ttft) / 8e9)
    assert metrics.output_tokens_per_s == pytest.approx(160 / metrics.makespan)


def test_an_explanation_adds_up(tmp_path):
    written(tmp_path)
    run = newest_run(tmp_path)
    said = explain(run)
    assert sum(said.parts.values()) == pytest.approx(sum(line.total_ns for line in run.timelines.values()) / 1e9)
    assert sum(kind.count for kind in said.kinds.values()) == said.num_steps == len(run.steps)
    assert sum(said.terms.values()) == pytest.approx(said.busy_s, rel=1e-6)
    assert said.metrics.makespan == pytest.approx(said.busy_s + said.host_s + said.idle_s, rel=1e-3)
    assert said.point.bytes_per_token == pytest.approx(
        (said.point.weight_bytes + said.point.kv_bytes) / said.point.batch
    )
    assert 0 < said.bandwidth_share < 1
    assert said.slow == ()


def test_a_trace_has_every_step_and_request(tmp_path):
    written(tmp_path)
    run = newest_run(tmp_path)
    events = list(trace_events(run))
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert len(steps) == len(run.steps)
    assert {event["tid"] for event in events if event["ph"] == "X" and event["pid"] == 1} == set(run.timelines)
    assert min(event["ts"] for event in events if "ts" in event) >= -1e-3


def test_equal_prefixes_have_equal_hashes():
    one = request(1, 40, 1)
    longer = replace(request(2, 60, 1))
    assert prefix_hashes(one, 16) == prefix_hashes(longer, 16)[:2]
    assert prefix_hashes(replace(one, cache_salt="a"), 16)[0] != prefix_hashes(one, 16)[0]
    assert prefix_hashes(replace(one, share_prefix=False), 16) == ()
