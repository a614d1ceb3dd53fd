"""A recorded run again with the step times that were measured: it must decide the same."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.errors import ConfigError
from foliolm.core.plan import StepPlan
from foliolm.core.record import StepRecord
from foliolm.ledger.reading import LedgerRun
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.counterfactual import arrival_of
from foliolm.simulate.run import run_arrivals

_NS = 1_000_000_000


class RecordedTimes:
    """A `CostModel` of a recorded run: from each step's planning to the next one's, in their order.

    Args:
        steps: of one engine, in order, all of them.
    """

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self._planned = [step.time_ns for step in steps] + [steps[-1].end_ns]
        self._next = 0

    def seconds(self, plan: StepPlan) -> float:
        """Seconds until the step after this was planned; a plan is asked for once."""
        at = self._next
        if at + 1 >= len(self._planned):
            raise ConfigError(f"step {plan.step_id}: the recorded run had only {at} steps")
        self._next += 1
        # Where the engine was idle in between, time goes on from the next arrival, not from here.
        return max(0, self._planned[at + 1] - plan.time_ns) / _NS


def replay_recorded(run: LedgerRun) -> list[StepRecord]:
    """The steps of a recorded run, planned again by the scheduler out of the same arrivals.

    Each request comes when the first plan was made that knew of it. Its answer has as many tokens as it had; what
    they were is not in the books, so that the answer's own blocks keep no prefix here: where idle prefixes had to be
    evicted, their number may differ.

    Raises:
        ConfigError: the run has no step or no request that ended, kept no step cost, or had steps in flight.
    """
    if not run.steps or not run.requests or run.cost is None:
        raise ConfigError("the ledger holds no step, no request that ended, or no step cost: nothing can be replayed")
    if run.engine.depth:
        raise ConfigError(f"the run planned {run.engine.depth} steps ahead; only runs that planned none are replayed")
    planned = [step.time_ns for step in run.steps]
    arrivals = []
    for record in run.requests:
        arrival = arrival_of(record, run.engine.scheduler.block_size)
        at = bisect.bisect_left(planned, record.stamps.queued_ns)
        if at == len(planned):
            continue
        arrivals.append(replace(arrival, time_ns=planned[at]))
    clock = VirtualClock(planned[0])
    engine = build_virtual_engine(run.engine.scheduler, Books(run.cost), clock, times=RecordedTimes(run.steps))
    steps: list[StepRecord] = []
    engine.ledger.on_step.append(steps.append)
    run_arrivals(engine, clock, arrivals)
    return steps
