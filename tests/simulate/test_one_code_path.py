"""One scheduler serves, simulates and is asked what if: break it, and all fail; wall time moves nothing."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import msgspec
import pytest
from engine.fake_engine import FakeExecutor

from foliolm import assemble
from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.clock import MonotonicClock
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.engine.engine import EngineInfo
from foliolm.executor.cost import CostExecutor
from foliolm.kv.prefix import PrefixIndex
from foliolm.ledger.reading import newest_run
from foliolm.scheduler import Scheduler
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.counterfactual import recorded, rerun
from foliolm.simulate.outcome import Machine, play
from foliolm.simulate.recorded_steps import replay_recorded
from foliolm.simulate.run import SimulationError
from foliolm.simulate.workload.options import WorkloadOptions
from support.books import real_cost

SETTINGS = SchedulerConfig(
    max_model_len=256,
    num_blocks=4097,
    block_size=4,
    max_num_batched_tokens=64,
    max_num_seqs=6,
    long_prefill_token_threshold=32,
    enable_prefix_caching=True,
)
WORK = WorkloadOptions(rate=20.0, sessions=4, turns="2", input_len="20", output_len="12", system_prompt_len=12)


class UnevenExecutor(FakeExecutor):
    """Steps that take as long as they like."""

    def __init__(self, seed):
        super().__init__()
        self.rng = random.Random(seed)

    def submit(self, plan):
        self.step_seconds = self.rng.uniform(1e-4, 3e-3)
        return super().submit(plan)


def live_engine(folder, seed=0):
    """As ``serve`` composes it, with an executor that makes up tokens in wall time."""
    info = EngineInfo("fake", SETTINGS.max_model_len, 256, SETTINGS.block_size, SETTINGS.num_blocks - 1)
    cost = real_cost()
    books = Books(cost, ledger=str(folder))
    return assemble._compose(SETTINGS, cost.model.kv, UnevenExecutor(seed), MonotonicClock(), info, books, 0)


def serve(engine, seed=0, count=30):
    """Requests that come while others run; everything that ended."""
    rng = random.Random(seed)
    shared = [tuple(rng.randrange(60, 90) for _ in range(24)) for _ in range(3)]
    waiting, ended = list(range(1, count + 1)), []
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2]) if engine.has_work else 1)):
            rid, now = waiting.pop(0), time.monotonic_ns()
            prompt = rng.choice(shared) + tuple(rng.randrange(60, 90) for _ in range(rng.randrange(1, 60)))
            sampling = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 30), ignore_eos=True)
            engine.add([EngineRequest(rid, prompt, sampling, arrival_ns=now, sent_ns=now)])
        engine.step()
        ended += engine.take_finished()
    engine.close()
    return ended


@pytest.mark.parametrize("seed", range(3))
def test_a_live_run_with_its_own_step_times_makes_the_same_decisions(tmp_path, seed):
    assert len(serve(live_engine(tmp_path, seed), seed)) == 30
    run = newest_run(tmp_path)
    again = replay_recorded(run)
    assert len(again) == len(run.steps)

    def decided(step):
        waits = [
            (one.kind, one.request_id, one.reason, one.needed, one.available, one.blocker) for one in step.decisions
        ]
        return (step.step_id, step.rows, step.num_decodes, step.decode_ids, step.decode_context, step.closed, waits)

    for mine, theirs in zip(again, run.steps, strict=True):
        assert decided(mine) == decided(theirs)
    assert any(step.decisions for step in again)
    assert any(context for step in again for _, _, context, _ in step.rows)


def virtual(leap=True):
    return play(Machine(SETTINGS, Books(real_cost(), timelines=False)), WORK.build(1, 256), leap=leap)


def test_they_all_work(tmp_path):
    assert {record.finish_reason for record in serve(live_engine(tmp_path))} == {FinishReason.LENGTH}
    assert virtual().collector.num_ended == 8
    assert rerun(recorded(newest_run(tmp_path), real_cost())).output_tokens_per_s > 0


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Scheduler, "schedule"), (Scheduler, "commit"), (PrefixIndex, "match"), (PrefixIndex, "publish")],
)
def test_what_breaks_one_breaks_all(tmp_path, monkeypatch, owner, method):
    serve(live_engine(tmp_path / "before"))
    run = newest_run(tmp_path / "before")

    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(owner, method, broken)
    # What breaks when a request is taken is its sender's to see; what breaks in a step ends its requests with an error.
    fails = pytest.raises((SimulationError, ZeroDivisionError))
    with fails:
        if any(record.finish_reason is FinishReason.ERROR for record in serve(live_engine(tmp_path / "after"))):
            raise ZeroDivisionError
    with fails:
        virtual()
    with fails:
        virtual(leap=False)
    with fails:
        rerun(recorded(run, real_cost()))
    if (owner, method) == (PrefixIndex, "match"):
        from foliolm.simulate.prefix_replay import replay_prefixes
        from foliolm.simulate.prefix_traces import PrefixChain

        with pytest.raises(ZeroDivisionError):
            replay_prefixes(iter([PrefixChain(16, (1, 2, 3, 4))] * 2), 4, None)


def test_serving_and_simulating_compose_their_engines_in_one_place(monkeypatch, tmp_path):
    built = []
    compose = assemble._compose
    monkeypatch.setattr(assemble, "_compose", lambda *args, **more: built.append(args[0]) or compose(*args, **more))
    virtual()
    build_virtual_engine(SETTINGS, Books(real_cost()), VirtualClock())
    assert built == [SETTINGS, SETTINGS]


@pytest.mark.parametrize("leap", [True, False])
def test_wall_time_moves_nothing(monkeypatch, leap):
    calm = json.dumps(virtual(leap).to_json(0.0))
    slept = []
    for name in ("submit", "steady"):
        original = getattr(CostExecutor, name)

        def sleepy(self, *args, _original=original):
            time.sleep(0.002)
            slept.append(1)
            return _original(self, *args)

        monkeypatch.setattr(CostExecutor, name, sleepy)
    assert json.dumps(virtual(leap).to_json(0.0)) == calm
    assert len(slept) > 10


def test_a_setting_that_changes_decisions_shows(tmp_path):
    """The comparison above is not blind: another budget decides otherwise."""
    serve(live_engine(tmp_path))
    run = newest_run(tmp_path)
    run.engine = msgspec.structs.replace(run.engine, scheduler=replace(SETTINGS, max_num_batched_tokens=24))
    try:
        again = replay_recorded(run)
    except SimulationError:
        return  # it needs more steps than were recorded
    assert [step.rows for step in again] != [step.rows for step in run.steps]
