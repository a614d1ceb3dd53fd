"""Calibration against steps whose cost is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.errors import ConfigError
from foliolm.core.resolve import SchedulerConfig
from foliolm.ledger.calibration import MOST_SLOWED, calibrate, mean_slowdown, step_error
from foliolm.ledger.cost_file import FORMAT, CostFile, load_cost, save_cost
from foliolm.ledger.plan_cost import Slowdown
from foliolm.ledger.samples import read_samples
from foliolm.ledger.self_calibration import FIRST_AFTER, TIMEOUT_S, SelfCalibration
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import real_cost, virtual_engine
from support.cli import refusal, run_json
from support.script import request
from support.steps import made_steps, with_coefficients

TRUTH = {
    "step_s": 3e-3,
    "layer_s": 0.0,
    "sequence_s": 2e-4,
    "chunk_s": 1e-3,
    "weights": 0.55,
    "matmul": 0.35,
    "kv_decode": 0.7,
    "kv_mixed": 0.3,
    "attention": 0.25,
    "prefix_reads": 2.0,
}


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma-3-27b-it", "qwen3-30b-a3b"])
def test_known_coefficients_come_back(model):
    prior = real_cost(model)
    truth = with_coefficients(prior, **TRUTH)
    found = calibrate(prior, made_steps(truth), table=False)
    # A step of 64 rows takes tens of milliseconds: of those 3 ms and 64 · 0.2 ms are the host's.
    assert found.cost.coefficients.step_s == pytest.approx(TRUTH["step_s"], rel=0.05, abs=1e-4)
    assert found.cost.coefficients.sequence_s == pytest.approx(TRUTH["sequence_s"], rel=0.05, abs=1e-5)
    assert found.cost.coefficients.chunk_s == pytest.approx(TRUTH["chunk_s"], rel=0.05, abs=1e-5)
    for name in ("weights", "matmul", "kv_decode", "kv_mixed", "attention"):
        assert getattr(found.cost.coefficients, name) == pytest.approx(TRUTH[name], rel=0.05), name
    assert found.errors["all"].median < 0.005
    assert found.errors.keys() == {"decode", "prefill", "mixed", "all"}


def test_noise_and_interrupted_steps_do_not_move_it_far():
    prior = real_cost()
    truth = with_coefficients(prior, **TRUTH)
    samples = made_steps(truth, 900, noise=0.05)
    samples = [replace(one, seconds=one.seconds * 4) if index % 17 == 0 else one for index, one in enumerate(samples)]
    found = calibrate(prior, samples)
    assert step_error(found.cost, made_steps(truth, seed=2)).median < 0.03


def test_a_table_takes_up_what_no_roofline_describes():
    prior = real_cost()
    truth = replace(
        with_coefficients(prior, **TRUTH), linear_knots=((1, 1.0), (8, 1.0), (16, 1.8), (64, 1.1), (2048, 1.0))
    )
    samples = made_steps(truth, 900, noise=0.02)
    without = calibrate(prior, samples, table=False).cost
    held = made_steps(truth, seed=3)
    assert step_error(calibrate(prior, samples).cost, held).median < 0.5 * step_error(without, held).median


def test_terms_that_the_data_leave_open_are_named_and_stay():
    prior = real_cost()
    truth = with_coefficients(prior, **TRUTH)
    one_context = [sample for sample in made_steps(truth, 900, most=2) if sample.kind == "decode"]
    found = calibrate(prior, one_context, table=False)
    assert set(found.unseen) >= {"kv_mixed", "attention", "prefix_reads"}
    assert any({"step_s", "weights"} == set(pair) for pair in found.alike)
    assert found.cost.coefficients.attention == pytest.approx(prior.coefficients.attention)


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match="9 steps are too few"):
        calibrate(real_cost(), made_steps(real_cost(), 9))


def test_records_of_a_run_are_read_as_samples():
    truth = with_coefficients(real_cost("gemma-3-27b-it"), **TRUTH)
    shape = {"num_blocks": 4000, "max_model_len": 8192, "max_num_batched_tokens": 512, "block_size": 16}
    engine, clock = virtual_engine(truth, **shape)
    run_arrivals(engine, clock, [Arrival(0, request(rid, 700 * rid, 60, arrival=rid)) for rid in range(1, 8)])
    samples = read_samples(truth.model, engine.ledger.steps)
    assert len(samples) == len(engine.ledger.steps)
    for sample in samples:
        assert sample.seconds == pytest.approx(truth.seconds(sample.counts), rel=1e-4)


def test_a_cost_file_comes_back_and_is_checked(tmp_path):
    cost = replace(with_coefficients(real_cost(), **TRUTH), linear_knots=((1.0, 1.5),))
    path = tmp_path / "some" / "cost.json"
    held = CostFile(FORMAT, "400 steps", 1e-4, cost, 7e-3, 4e-3, Slowdown(1.1, 1.05))
    save_cost(path, held)
    assert load_cost(path, cost.model) == held
    with pytest.raises(ConfigError, match="another model or number type: its num_layers is 36, here it is 62"):
        load_cost(path, real_cost("gemma-3-27b-it").model)
    path.write_text(path.read_text()[:200])
    with pytest.raises(ConfigError, match="damaged"):
        load_cost(path)


def test_an_engine_calibrates_itself():
    truth = with_coefficients(real_cost(), **TRUTH)
    shape = {"num_blocks": 4000, "max_model_len": 4096, "max_num_batched_tokens": 256, "block_size": 16}
    engine, clock = virtual_engine(truth, **shape)
    ledger = engine.ledger
    ledger.cost = real_cost()  # what it believes is not what its executor does
    itself = SelfCalibration(ledger, ledger.cost)
    ledger.on_step.append(itself.take)
    arrivals = [Arrival(rid * 10**8, request(rid, 40 + 90 * rid, 60 + rid, arrival=rid)) for rid in range(1, 40)]
    run_arrivals(engine, clock, arrivals)
    assert len(ledger.steps) >= FIRST_AFTER
    itself.join(TIMEOUT_S)  # a process of the lowest priority, which busy neighbours may hold up
    before = len(ledger.steps)
    run_arrivals(engine, clock, [Arrival(clock.now(), request(99, 500, 30, arrival=1))])
    later = list(ledger.steps)[before + 1 :]
    assert {record.cost_source for record in later} == {"calibrated"}
    assert max(abs(record.predicted_s / record.seconds.total - 1) for record in later) < 0.1
    assert ledger.steps[0].cost_source == "default"
    for record in engine.finished:
        assert sum(ns for _, ns in record.timeline.parts) == record.timeline.total_ns


def test_a_cost_file_of_before_the_hosts_times_is_read_too(tmp_path):
    path = tmp_path / "cost.json"
    save_cost(path, CostFile(FORMAT, "400 steps", 1e-4, real_cost(), 7e-3, 4e-3, Slowdown(1.1, 1.05)))
    held = json.loads(path.read_text())
    for name in ("http_s", "delivery_s", "slowdown"):
        del held[name]
    path.write_text(json.dumps(held))
    assert load_cost(path) == CostFile(FORMAT, "400 steps", 1e-4, real_cost())
    path.write_text(json.dumps({**held, "slowdown": {"decode": 0.0}}))
    with pytest.raises(ConfigError, match=r"slowdown decode is 0\.0; it must be finite and above 0"):
        load_cost(path)


def test_what_interruptions_add_to_all_steps_is_told_apart_from_typical_steps():
    truth = with_coefficients(real_cost(), **TRUTH)
    samples = made_steps(truth, 900)
    decodes = [index for index, sample in enumerate(samples) if sample.kind == "decode"]
    for index in decodes[::10]:
        samples[index] = replace(samples[index], seconds=3 * samples[index].seconds)
    typical = sum(truth.seconds(samples[index].counts) for index in decodes)
    found = calibrate(real_cost(), samples, table=False)
    assert found.slowdown.decode == pytest.approx(sum(samples[index].seconds for index in decodes) / typical, rel=0.02)
    assert found.slowdown.prompt == pytest.approx(1.0, rel=0.01)
    hour = [replace(samples[0], seconds=3600.0)]
    assert mean_slowdown(truth, hour).decode == MOST_SLOWED
    assert mean_slowdown(truth, []) == Slowdown(1.0, 1.0)


def test_several_ledgers_are_fitted_together(tmp_path):
    shape = SchedulerConfig(max_model_len=4096, num_blocks=2000, max_num_batched_tokens=512, max_num_seqs=16)

    def run(name, model, host_s, count):
        clock = VirtualClock(1000)
        books = Books(with_coefficients(real_cost(model), **TRUTH), ledger=str(tmp_path / name))
        engine = build_virtual_engine(shape, books, clock, host_s)
        run_arrivals(engine, clock, [Arrival(1000, request(rid, 200 * rid, 20)) for rid in range(1, count)])
        engine.close()
        return len(engine.ledger.steps)

    steps = run("one", "qwen3-8b", 1e-3, 4), run("two", "qwen3-8b", 3e-3, 9)
    run("other", "qwen3-0.6b", 1e-3, 4)
    said = run_json("calibrate", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "cost.json")
    assert said["steps"] == sum(steps)
    assert said["host_gap_s"] == pytest.approx((steps[0] * 1e-3 + steps[1] * 3e-3) / sum(steps), rel=0.01)
    assert load_cost(tmp_path / "cost.json").host_gap_s == said["host_gap_s"]
    assert "another model" in refusal("calibrate", tmp_path / "one", tmp_path / "other")
    assert "is a file among several" in refusal("calibrate", tmp_path / "one", tmp_path / "cost.json")
    assert "no such folder or file" in refusal("calibrate", tmp_path / "one", tmp_path / "nowhere")
