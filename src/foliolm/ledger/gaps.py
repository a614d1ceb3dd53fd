"""The time between steps: what the host needs, and what was idle."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from foliolm.core.plan import DecisionKind
from foliolm.core.record import StepRecord

_S = 1e-9
MOST_GAP = 20.0


def host_gap_s(steps: Sequence[StepRecord]) -> float:
    """Mean seconds between a step's end and the next one's start, where the next followed at once.

    No gap counts for more than ``MOST_GAP`` median ones.
    """
    busy = [max(0.0, gap) for gap, idle in gaps(steps) if not idle]
    most = MOST_GAP * statistics.median(busy) if busy else 0.0
    return statistics.fmean(min(gap, most) for gap in busy) if busy else 0.0


def gaps(steps: Sequence[StepRecord]) -> list[tuple[float, bool]]:
    """(seconds, whether nobody was there) between steps: where all rows of a step end, the next may be long after."""
    found = []
    previous: StepRecord | None = None
    for step in steps:
        if previous is not None:
            gap = (step.end_ns - previous.end_ns) * _S - step.seconds.total
            # An arrival into an idle engine is planned at once: the time before its plan was idle.
            planned = (step.time_ns - previous.end_ns) * _S
            admitted = {one.request_id for one in step.decisions if one.kind is DecisionKind.ADMIT}
            alone = step.num_decodes == 0 and all(not context or rid in admitted for rid, _, context, _ in step.rows)
            found.append((gap, alone and planned > 0.5 * gap and gap > 1e-3))
        previous = step
    return found


def host_and_idle_s(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Seconds between steps while there was work, and while there was none."""
    found = gaps(steps)
    return sum(max(0.0, gap) for gap, idle in found if not idle), sum(gap for gap, idle in found if idle)


def wall_seconds(steps: Sequence[StepRecord]) -> list[float]:
    """Seconds of each step by the clock: the step, and what the host did between the one before it and this one."""
    before = [0.0, *(0.0 if idle else max(0.0, gap) for gap, idle in gaps(steps))]
    return [gap + step.seconds.total for gap, step in zip(before, steps, strict=False)]
