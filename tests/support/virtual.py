"""The scheduler under a virtual clock: a step takes what the step cost says, and nothing reads wall time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from foliolm.core.plan import LogitsAt, StepPlan
from foliolm.core.request import EngineRequest
from foliolm.core.result import StepResult, StepSeconds
from foliolm.scheduler import Scheduler


@dataclass
class Times:
    """Seconds since the start, by request."""

    arrival: float
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.first - self.arrival


def run_virtual(
    scheduler: Scheduler,
    arrivals: list[tuple[float, EngineRequest]],
    seconds: Callable[[StepPlan], float],
    next_of: Callable[[EngineRequest, float], EngineRequest | None] = lambda ended, now: None,
) -> tuple[dict[int, Times], float]:
    """Serve arrivals (second, request); ``next_of`` may answer an end with another arrival (a closed loop).

    Returns:
        Times by request id, and the makespan in seconds.
    """
    clock = 0.0
    due = [(time, request.request_id, request) for time, request in arrivals]
    heapq.heapify(due)
    times: dict[int, Times] = {}
    sources: dict[int, EngineRequest] = {}
    while due or scheduler.has_work:
        if not scheduler.has_work:
            clock = max(clock, due[0][0])
        while due and due[0][0] <= clock:
            arrival, rid, request = heapq.heappop(due)
            scheduler.add(request, int(clock * 1e9))
            times[rid], sources[rid] = Times(arrival), request
        plan = scheduler.schedule(int(clock * 1e9))
        assert plan.num_rows, "work, but nothing to run"
        clock += seconds(plan)
        for row in plan.all_rows():
            if row.logits & LogitsAt.LAST:
                mine = times[row.request_id]
                if mine.first:
                    mine.gaps.append(clock - mine.last)
                mine.first, mine.last = mine.first or clock, clock
        for output in scheduler.commit(plan, StepResult(plan.step_id, None, StepSeconds(0.0)), int(clock * 1e9)):
            following = next_of(sources[output.request_id], clock)
            if following is not None:
                heapq.heappush(due, (clock, following.request_id, following))
    return times, clock
