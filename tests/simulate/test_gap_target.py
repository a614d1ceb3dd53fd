"""--itl-target-ms: the largest chunk whose predicted step stays under the target."""

from __future__ import annotations

import random

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.plan import Closed
from foliolm.core.resolve import SchedulerConfig
from foliolm.ledger.run_metrics import token_gaps, weighted_quantile
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import MS, real_cost
from support.script import request
from support.steps import with_coefficients

SETTINGS = SchedulerConfig(max_model_len=8192, num_blocks=4000, max_num_batched_tokens=2048, max_num_seqs=16)


class Uneven:
    """A step cost on a machine whose steps vary: each is its prediction times e to the power of a normal draw."""

    def __init__(self, cost, spread, seed):
        self._cost, self._spread, self._rng = cost, spread, random.Random(seed)

    def seconds(self, plan):
        return self._cost.seconds(plan) * self._rng.lognormvariate(0, self._spread)


def served(target_ms, believed=None, spread=0.0, seed=0):
    """Eight streams and a prompt of 4,000 tokens; the steps with chunks, and the prompt's TTFT in seconds."""
    clock = VirtualClock(1)
    engine = build_virtual_engine(SETTINGS, Books(real_cost(), itl_target_ms=target_ms), clock)
    if believed is not None:
        engine.ledger.cost = believed
    if spread:
        engine.executor.cost = Uneven(engine.executor.cost, spread, seed)
    jobs = [Arrival(1, request(rid, 64, 300, arrival=1)) for rid in range(1, 9)]
    jobs.append(Arrival(1000 * MS, request(9, 4000, 2, arrival=1000 * MS)))
    run = run_arrivals(engine, clock, jobs)
    long = next(record for record in run.finished if record.request_id == 9)
    steps = list(engine.ledger.steps)
    during = [step for step in steps if step.num_decodes == 8 and step.rows]
    return steps, during, (long.stamps.first_token_ns - 1000 * MS) / 1e9


@pytest.mark.parametrize("off_by", [1.0, 0.7, 1.2])
def test_gaps_keep_the_target_even_where_the_model_is_off(off_by):
    steps, _, default = served(None)
    decode_only = weighted_quantile(token_gaps(steps), 0.5)
    target = 2.5 * decode_only
    c = real_cost().coefficients
    believed = with_coefficients(real_cost(), weights=c.weights * off_by, matmul=c.matmul * off_by)
    _, during, ttft = served(target * 1e3, believed)
    gaps = sorted(step.seconds.total for step in during)
    assert gaps[int(0.95 * len(gaps))] < 1.25 * target
    assert ttft < 2.5 * default
    settled = during[len(during) // 2 : -1]
    assert max(step.seconds.total for step in settled) == pytest.approx(target, rel=0.1), "the largest chunk, no less"
    assert {step.closed for step in settled} <= {Closed.COMPUTE, Closed.BANDWIDTH}


@pytest.mark.parametrize("spread", [0.1, 0.2])
def test_gaps_keep_the_target_where_the_machines_steps_vary(spread):
    steps, _, default = served(None)
    target = 2.5 * weighted_quantile(token_gaps(steps), 0.5)
    runs = [served(target * 1e3, spread=spread, seed=seed) for seed in range(8)]
    gaps = sorted(step.seconds.total for _, during, _ in runs for step in during)
    assert gaps[int(0.95 * len(gaps))] < 1.25 * target
    assert max(ttft for _, _, ttft in runs) < 2.5 * default


def test_a_target_that_the_streams_alone_miss_still_lets_a_prompt_get_on():
    _, during, _ = served(0.001)
    assert {step.rows[0][1] for step in during[:-1]} == {4}


def test_without_streams_nothing_is_bounded():
    clock = VirtualClock(1)
    engine = build_virtual_engine(SETTINGS, Books(real_cost(), itl_target_ms=1.0), clock)
    run_arrivals(engine, clock, [Arrival(1, request(1, 4000, 2, arrival=1))])
    assert engine.ledger.steps[0].num_tokens == 2048
