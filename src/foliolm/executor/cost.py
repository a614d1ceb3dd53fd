"""The executor that computes nothing: a step takes the time that a cost model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from foliolm.core.plan import StepPlan
from foliolm.core.protocols import CostModel
from foliolm.core.result import StepResult, StepSeconds

if TYPE_CHECKING:
    from foliolm.core.protocols import SteadyCost

_NS = 1_000_000_000
_NEVER = 1 << 63


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

    @property
    def knows_steady(self) -> bool:
        """Whether `steady` can say what like decode steps take."""
        return getattr(self.cost, "knows_steady", False)

    def steady(
        self, num_decodes: int, context: int, longest: Callable[[], int], most: int, until_ns: int | None
    ) -> list[int]:
        """Run up to ``most`` steps of the same decodes: nanoseconds of each, time advanced past all of them.

        Args:
            num_decodes: rows.
            context: their contexts together, before the first step.
            longest: says the longest of them; not every cost model asks.
            most: steps, at least 1.
            until_ns: no step begins (the host's part included) at or after this; None: all are run.
        """
        cost = cast("SteadyCost", self.cost)
        now, host, until = self._clock.now(), self._host_ns, _NEVER if until_ns is None else until_ns
        line = cost.steady_line(num_decodes)
        times: list[int] = []
        if line is not None:
            fixed, each = line
            for every in range(context, context + most * num_decodes, num_decodes):
                if now >= until:
                    break
                times.append(time_ns := round((fixed + every * each) * _NS))
                now += host + time_ns
        else:
            first = longest()
            for step in range(most):
                if now >= until:
                    break
                seconds = cost.steady_seconds(num_decodes, context + step * num_decodes, first + step)
                times.append(time_ns := round(seconds * _NS))
                now += host + time_ns
        self._clock.advance_to(now)
        self._busy_until = now
        return times

    def close(self) -> None:
        """Nothing is held."""
