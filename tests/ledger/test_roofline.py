"""How near the machine's limits steps ran: exact figures for steps of known bytes, FLOPs and seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.errors import ConfigError
from foliolm.core.machine import MachineLimits
from foliolm.core.plan import Closed
from foliolm.core.record import StepRecord, StepWork
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.result import StepSeconds
from foliolm.engine.messages import EngineStats
from foliolm.ledger.accounts import attention_pairs, linear_flops, weight_bytes_per_step
from foliolm.ledger.explain import explain
from foliolm.ledger.metrics import Metrics
from foliolm.ledger.reading import newest_run
from foliolm.ledger.roofline import SINGLE, UNKNOWN, achieved
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import MS, real_cost
from support.cli import run_json, run_text
from support.script import request

LIMITS = MachineLimits(20e9, 250e9, "int8", "made up")
MB, G = 1e6, 1e9


def step(index, end_ms, forward_ms, *, decodes=0, new=0, total_ms=None, work=None):
    """A record with ``decodes`` decode rows and, where ``new`` is not 0, a prompt's chunk of so many tokens."""
    return StepRecord(
        engine=0,
        step_id=index,
        time_ns=round((end_ms - forward_ms) * MS),
        num_rows=decodes + bool(new),
        num_decodes=decodes,
        num_tokens=decodes + new,
        num_sampled=decodes,
        context_tokens=0,
        seconds=StepSeconds((total_ms or forward_ms) / 1e3, forward=forward_ms / 1e3),
        closed=Closed.EMPTY,
        end_ns=round(end_ms * MS),
        rows=((99, new, 0, 0),) if new else (),
        work=work or StepWork(weight_bytes=80 * MB, kv_bytes=12 * MB, linear_flops=0.25 * G, decode_flops=0.01 * G),
    )


def by_kind(steps, limits=LIMITS):
    return {one.kind: one for one in achieved(steps, limits)}


def test_a_step_has_rates_of_its_bytes_and_flops_in_the_models_seconds():
    work = StepWork(
        weight_bytes=60 * MB, kv_bytes=20 * MB, prefix_bytes=8 * MB, linear_flops=3 * G, attention_flops=1 * G,
        lora_bytes=4 * MB, lora_flops=0.5 * G, decode_flops=0.5 * G,
    )  # fmt: skip
    one = step(1, 10, 5, decodes=2, new=4, total_ms=8, work=work)
    assert one.read_bytes == 92 * MB
    assert one.flops == 5 * G
    assert one.read_rate == pytest.approx(92 * MB / 5e-3)
    assert one.flop_rate == pytest.approx(5 * G / 5e-3)
    whole = replace(one, seconds=StepSeconds(8e-3))
    assert whole.read_rate == pytest.approx(92 * MB / 8e-3), "parts that were not measured: the whole step counts"
    assert replace(one, seconds=StepSeconds(0.0)).read_rate == 0.0


def test_decodes_of_one_by_the_models_time_and_by_the_clock():
    # 6 ms in the model, 7 ms the step, and 1 ms of the host's before it.
    steps = [step(index, 8.0 * index, 6.0, decodes=1, total_ms=7.0) for index in range(1, 6)]
    found = by_kind(steps)
    assert set(found) == {"decode", SINGLE}
    one = found[SINGLE]
    assert one.steps == 5
    assert one.sequences == 1
    assert one.read_bytes == 92 * MB
    assert one.read_gb_per_s == pytest.approx(92 / 6)
    assert one.bandwidth_share == pytest.approx(92 / 6 / 20)
    assert one.gflop_per_s == pytest.approx(260 / 6)
    assert one.flops_share == pytest.approx(260 / 6 / 250)
    assert one.wall_seconds == pytest.approx(8e-3)
    assert one.wall_read_gb_per_s == pytest.approx(92 / 8)
    assert one.wall_bandwidth_share == pytest.approx(92 / 8 / 20)
    assert one.wall_flops_share == pytest.approx(260 / 8 / 250)
    assert one.binds == "bandwidth"
    assert one.words == (
        "decode steps of 1 sequence read 92.0 MB in 6.0 ms: 15.3 GB/s, 77% of what this machine reads "
        "(57% by the clock, 8.0 ms)"
    )


def test_kinds_stand_apart_and_each_has_the_limit_that_binds_it():
    prompt = StepWork(weight_bytes=90 * MB, linear_flops=400 * G, attention_flops=50 * G)
    both = StepWork(weight_bytes=90 * MB, kv_bytes=30 * MB, linear_flops=9 * G, attention_flops=1 * G)
    steps = [
        step(1, 3000, 2250, new=2048, work=prompt),
        step(2, 3060, 50, decodes=4, new=32, work=both),
        step(3, 3070, 10, decodes=4),
        step(4, 3080, 10, decodes=1),
    ]
    found = by_kind(steps)
    assert list(found) == ["decode", SINGLE, "prefill", "mixed"]
    assert {kind: one.steps for kind, one in found.items()} == {"decode": 2, SINGLE: 1, "prefill": 1, "mixed": 1}
    prefill, mixed = found["prefill"], found["mixed"]
    assert (prefill.binds, mixed.binds, found["decode"].binds) == ("compute", "compute", "bandwidth")
    assert prefill.gflop_per_s == pytest.approx(200)
    assert prefill.flops_share == pytest.approx(0.8)
    assert prefill.words == (
        "prefill steps of 2,048 tokens compute 450.0 GFLOP in 2,250.0 ms: 200.0 GFLOP/s, 80% of what this machine "
        "multiplies (80% by the clock, 2,250.0 ms)"
    )
    assert mixed.read_gb_per_s == pytest.approx(2.4)
    assert mixed.flops_share == pytest.approx(0.8)
    assert mixed.words.startswith("mixed steps of 5 sequences and 36 new tokens compute 10.0 GFLOP in 50.0 ms")


def test_idle_time_before_a_prompt_is_no_ones():
    prompt = StepWork(weight_bytes=90 * MB, linear_flops=400 * G)
    first, late = step(1, 100, 100, new=64, work=prompt), step(2, 9000, 100, new=64, work=prompt)
    assert by_kind([first, late])["prefill"].wall_seconds == pytest.approx(0.1)


def test_the_median_leaves_a_disturbed_step_out():
    steps = [step(index, 10.0 * index, 6.0, decodes=1) for index in range(1, 4)]
    steps.append(step(4, 100.0, 60.0, decodes=1))
    assert by_kind(steps)[SINGLE].read_gb_per_s == pytest.approx(92 / 6)


def test_without_limits_the_rates_stand_and_the_shares_do_not():
    one = by_kind([step(1, 10, 5, decodes=1)], None)[SINGLE]
    assert one.read_gb_per_s == pytest.approx(92 / 5)
    assert (one.bandwidth_share, one.flops_share, one.wall_bandwidth_share, one.binds) == (None, None, None, None)
    assert one.words == "decode steps of 1 sequence read 92.0 MB in 5.0 ms: 18.4 GB/s"


def test_steps_whose_bytes_nobody_counted_are_passed_over():
    assert achieved([step(1, 10, 5, decodes=1, work=StepWork(linear_flops=1.0))], LIMITS) == ()
    assert achieved([], LIMITS) == ()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_limits_are_above_zero(value):
    with pytest.raises(ConfigError, match="read_bytes_per_s"):
        MachineLimits(value, 1.0, "int8", "made up")
    with pytest.raises(ConfigError, match="flops_per_s"):
        MachineLimits(1.0, value, "int8", "made up")


def test_metrics_carry_the_newest_steps_rates_the_sums_and_the_machines_limits():
    metrics = Metrics("m")
    metrics.observe_limits(0, LIMITS)
    for one in (step(1, 10, 4, decodes=1), step(2, 20, 5, decodes=1)):
        metrics.observe_step(0, EngineStats(), one)
    samples = [line for line in metrics.exposition().decode().splitlines() if "{" in line]
    told = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in samples}
    assert told["foliolm:machine_read_bytes_per_second"] == LIMITS.read_bytes_per_s
    assert told["foliolm:machine_flops_per_second"] == LIMITS.flops_per_s
    assert told["foliolm:achieved_read_bytes_per_second"] == pytest.approx(92 * MB / 5e-3)
    assert told["foliolm:achieved_flops_per_second"] == pytest.approx(0.26 * G / 5e-3)
    assert told["foliolm:estimated_read_bytes_per_gpu_total"] == 184 * MB
    assert told["foliolm:estimated_flops_per_gpu_total"] == pytest.approx(0.52 * G)
    assert told["foliolm:forward_seconds_total"] == pytest.approx(9e-3)


@pytest.fixture
def books(tmp_path):
    """A ledger of a run with all kinds of steps, and the engine that wrote it."""
    settings = SchedulerConfig(max_model_len=4096, num_blocks=2000, max_num_batched_tokens=512, max_num_seqs=16)
    clock = VirtualClock(1000)
    engine = build_virtual_engine(
        settings, Books(real_cost(), ledger=str(tmp_path), limits=replace(LIMITS, read_bytes_per_s=1e12)), clock
    )
    arrivals = [Arrival(rid * 40 * MS, request(rid, 300 * rid, 20, arrival=rid * 40 * MS)) for rid in range(1, 4)]
    run_arrivals(engine, clock, arrivals)
    engine.close()
    return tmp_path, engine


def test_a_ledger_holds_the_limits_and_the_work_of_each_step(books):
    folder, engine = books
    run = newest_run(folder)
    assert run.engine.limits == engine.ledger.limits == replace(LIMITS, read_bytes_per_s=1e12)
    model, decode = run.cost.model, next(one for one in run.steps if one.kind == "decode" and one.num_decodes == 1)
    context = decode.decode_context
    assert decode.read_bytes == weight_bytes_per_step(model, 1) + context * model.kv_bytes_per_token
    assert decode.flops == linear_flops(model, 1, 1) + context * model.num_layers * model.decode_flops_per_pair
    prompt = next(one for one in run.steps if one.kind == "prefill" and one.num_tokens > 1)
    ((_, new, cached, sampled),) = prompt.rows
    pairs = attention_pairs(new, cached)
    assert prompt.flops == pytest.approx(
        linear_flops(model, new, sampled) + pairs * model.num_layers * model.attention_flops_per_pair
    )


def test_explain_says_it_in_text_json_and_html(books):
    folder, _ = books
    page = folder / "report.html"
    plain = " ".join(run_text("explain", folder, "--no-advice", "--html", page).split())
    said = explain(newest_run(folder))
    assert {one.kind for one in said.achieved} == {"decode", SINGLE, "prefill", "mixed"}
    for one in said.achieved:
        assert one.words in plain
        assert one.words in page.read_text()
    assert said.limits.describe() in plain
    held = run_json("explain", folder, "--no-advice")
    assert held["limits"]["flops_per_s"] == 250e9
    assert [one["words"] for one in held["achieved"]] == [one.words for one in said.achieved]
    assert {one["binds"] for one in held["achieved"]} <= {"bandwidth", "compute"}


def test_an_old_ledger_without_limits_still_explains(books):
    folder, _ = books
    (path,) = folder.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["limits"]
    for line in lines:
        if line["kind"] == "step":
            del line["step"]["work"]["decode_flops"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = explain(newest_run(folder))
    assert said.limits is None
    assert said.bandwidth_share is None
    assert said.achieved
    assert {one.bandwidth_share for one in said.achieved} == {None}
    page = folder / "report.html"
    assert UNKNOWN in " ".join(run_text("explain", folder, "--no-advice", "--html", page).split())
    assert escape(UNKNOWN[1:]) in page.read_text()
