"""The executor that computes nothing: a step takes the time that a cost model says."""

from __future__ import annotations

from typing import Protocol

from foliolm.core.plan import StepPlan
from foliolm.core.protocols import CostModel
from foliolm.core.result import StepResult, StepSeconds

_NS = 1_000_000_000


class AdvancingClock(Protocol):
    """A clock that is told when time passes."""

    def now(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        ...

    def advance_to(self, time_ns: int) -> None:
        """Let time pass until ``time_ns``."""
        ...


class CostHandle:
    """A step that is done when the clock says so."""

    def __init__(self, result: StepResult, end_ns: int, clock: AdvancingClock) -> None:
        self._result = result
        self._end_ns = end_ns
        self._clock = clock

    def wait(self) -> StepResult:
        """Let time pass until the step is done."""
        self._clock.advance_to(self._end_ns)
        return self._result


class CostExecutor:
    """Runs plans one after another in virtual time. Its tokens have no content.

    Args:
        cost: predicts each step.
        clock: is advanced; nothing here reads wall time.
        host_s: seconds that the host needs between taking a step's result and submitting the next.
    """

    def __init__(self, cost: CostModel, clock: AdvancingClock, host_s: float = 0.0) -> None:
        self.cost = cost
        self._clock = clock
        self._host_ns = round(host_s * _NS)
        self._busy_until = 0

    def submit(self, plan: StepPlan) -> CostHandle:
        """Begin a step, once the one before it is done."""
        self._clock.advance_to(self._clock.now() + self._host_ns)
        time_ns = round(self.cost.seconds(plan) * _NS)
        start = max(self._clock.now(), self._busy_until)
        self._busy_until = start + time_ns
        return CostHandle(StepResult(plan.step_id, None, StepSeconds(time_ns / _NS)), self._busy_until, self._clock)

    def close(self) -> None:
        """Nothing is held."""
