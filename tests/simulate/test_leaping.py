"""Runs of like decode steps taken at once: nothing that anybody is told may change."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from foliolm.assemble import Books
from foliolm.core.resolve import SchedulerConfig
from foliolm.engine.engine import Engine
from foliolm.ledger.plan_cost import PlanCost, Slowdown
from foliolm.simulate.outcome import Machine, play
from foliolm.simulate.workload.options import WorkloadOptions
from support.books import real_cost

SETTINGS = SchedulerConfig(
    max_model_len=1024,
    num_blocks=400,
    max_num_batched_tokens=1024,
    max_num_seqs=12,
    long_prefill_token_threshold=512,
    enable_prefix_caching=True,
)


def machine(settings=SETTINGS, host_s=0.0, depth=0, model="qwen3-8b", slowdown=None):
    cost = real_cost(model)
    times = None if slowdown is None else PlanCost(cost, slowdown=slowdown)
    return Machine(settings, Books(cost, timelines=False), host_s, depth, times)


def lines(how, workload, seed, leap):
    """Everything that a run says, and every request's own times."""
    outcome = play(how, workload.build(seed, how.settings.max_model_len), leap=leap)
    mine = outcome.collector
    each = [list(values) for values in (mine.ttft, mine.tpot, mine.e2e, mine.queue)]
    return json.dumps([outcome.to_json(0.0), each, mine.curve.points])


def random_case(seed):
    """Settings and a workload of any kind."""
    rng = random.Random(seed)
    mode = rng.choice(["chunked", "chunked", "mixed", "prefill-first", "static"])
    settings = replace(
        SETTINGS,
        mode=mode,
        num_blocks=rng.choice([70, 110, 400]),
        max_num_seqs=rng.choice([3, 12, 64]),
        block_size=rng.choice([1, 4, 16]) if mode == "chunked" else 16,
        watermark_blocks=rng.choice([0, 3]),
        enable_prefix_caching=rng.random() < 0.7,
        preemption_mode=rng.choice(["recompute", "auto"]),
        num_host_blocks=rng.choice([0, 200]),
        kv_offloading=rng.choice(["off", "auto", "always"]),
    )
    settings = replace(settings, num_blocks=settings.num_blocks * 16 // settings.block_size)
    arrivals = (
        {"rate": rng.choice([2.0, 20.0, 200.0])} if rng.random() < 0.7 else {"concurrency": rng.choice([1, 5, 20])}
    )
    lengths = {"input_len": "lognormal:120:1.2", "output_len": rng.choice(["uniform:1:120", "40", "lognormal:60:1"])}
    if rng.random() < 0.4:
        work = WorkloadOptions(
            **arrivals,
            **lengths,
            sessions=6,
            turns="uniform:1:4",
            think_s="exponential:0.5",
            system_prompt_len=rng.choice([0, 70]),
            branches=rng.choice([1, 1, 3]),
        )
    else:
        work = WorkloadOptions(**arrivals, **lengths, requests=30)
    return settings, work, rng.choice([0.0, 3e-4])


@pytest.mark.parametrize("seed", range(24))
def test_leaping_changes_nothing(seed, monkeypatch):
    settings, work, host_s = random_case(seed)
    counted = {"leaps": 0, "steps": 0}
    leap, step = Engine.leap, Engine.step

    def counting_leap(self, until):
        taken = leap(self, until)
        counted["leaps"] += taken is not None
        if taken is not None:
            assert self.check_invariants() == []
        return taken

    def counting_step(self):
        counted["steps"] += 1
        return step(self)

    monkeypatch.setattr(Engine, "leap", counting_leap)
    monkeypatch.setattr(Engine, "step", counting_step)
    slowdown = Slowdown(decode=1.07, prompt=1.3) if seed % 3 == 0 else None
    one = lines(machine(settings, host_s, slowdown=slowdown), work, seed, leap=True)
    leapt = counted["steps"]
    assert counted["leaps"] > 0
    assert one == lines(machine(settings, host_s, slowdown=slowdown), work, seed, leap=False)
    assert leapt < counted["steps"] - leapt


def test_nobody_leaps_where_steps_are_read(tmp_path, monkeypatch):
    taken = []
    leap = Engine.leap
    monkeypatch.setattr(Engine, "leap", lambda self, until: taken.append(leap(self, until)) or taken[-1])
    work = WorkloadOptions(rate=5.0, requests=5, input_len="50", output_len="50")
    for how in (
        Machine(SETTINGS, Books(real_cost(), ledger=str(tmp_path), timelines=False)),
        Machine(SETTINGS, Books(real_cost(), itl_target_ms=50.0, timelines=False)),
        machine(depth=1),
        machine(model="gemma-3-4b-it"),
    ):
        play(how, work.build(0, 1024))
    assert taken
    assert set(taken) == {None}


def test_a_step_that_nobody_leaps_takes_what_the_cost_model_says():
    """The price of a steady step is read from its numbers alone; a plan's must be the same to the last bit."""
    how = machine()
    work = WorkloadOptions(rate="inf", requests=12, input_len="100", output_len="64")
    slow = play(how, replace(work, rate=float("inf")).build(0, 1024), leap=False)
    cost = real_cost()
    first = cost.decode_seconds(12, 101)
    assert slow.collector.gaps.summary()["p50"] == pytest.approx(first, rel=0.01)
