"""The budget that follows the cost model: the largest chunk whose predicted step stays under a target."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from foliolm.core.plan import Closed
from foliolm.ledger.step_cost import StepCost, StepCounts

if TYPE_CHECKING:
    from foliolm.core.record import StepRecord
    from foliolm.ledger.ledger import Ledger

LEAST_CHUNK = 4
"""Prompt tokens that a step takes even where the streams alone miss the target: a prompt must get on."""
MEMORY = 0.15
"""Weight of the newest step in the running ratio of measured to predicted time."""
MOST_CORRECTION = 4.0
TOLERANCE = 1.25
"""A gap keeps its target while it is below this multiple; steps are sized so that nearly all are."""
SPREADS = 4.0
"""Mean absolute deviations above the mean below which nearly all steps lie, as RFC 6298 has it: 95% of normal ones lie
below 2.06, but mean and deviation are themselves learnt from a handful of steps."""


class TargetChunks:
    """A `ChunkBudget` out of the ledger's step cost.

    What the cost model gets wrong about steps with chunks is corrected by the running ratio of measured to predicted
    seconds of such steps, so that a target is kept by a model that is some percent off. On a machine whose steps vary,
    the target is aimed below by as much as keeps nearly all steps under ``TOLERANCE`` times it; both running figures
    are kept as TCP keeps those of its round trips (RFC 6298).

    Args:
        ledger: its current step cost predicts; without one nothing is bounded.
        target_s: seconds that a step with chunks beside streams may take.
    """

    def __init__(self, ledger: Ledger, target_s: float) -> None:
        self._ledger = ledger
        self.target_s = target_s
        self.correction = 1.0
        self.deviation = (TOLERANCE - 1) / SPREADS

    def observe(self, record: StepRecord) -> None:
        """Learn from a step that ran."""
        if not record.num_decodes or not record.rows or record.predicted_s <= 0:
            return
        # One step that the machine interrupted must not throttle the next ten.
        ratio = min(2.0 * self.correction, max(0.5 * self.correction, record.seconds.total / record.predicted_s))
        self.deviation += MEMORY * (abs(ratio / self.correction - 1) - self.deviation)
        moved = self.correction + MEMORY * (ratio - self.correction)
        self.correction = min(MOST_CORRECTION, max(1 / MOST_CORRECTION, moved))

    def prompt_tokens(
        self, num_decodes: int, decode_context: int, context: int, most: int
    ) -> tuple[int, Closed | None]:
        """See `ChunkBudget`."""
        cost = self._ledger.cost
        if cost is None:
            return most, None
        allowed = self.target_s / self.correction * min(1.0, TOLERANCE / (1 + SPREADS * self.deviation))
        decodes = StepCounts(num_decodes, num_decodes, num_decodes, (float(decode_context),) * len(cost.model.kv))
        if _seconds(cost, decodes, most, context) <= allowed:
            return most, None
        low, high = 0, most  # low fits (or is nothing), high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _seconds(cost, decodes, middle, context) <= allowed else (low, middle)
        tokens = min(most, max(LEAST_CHUNK, low))
        if tokens == most:
            return most, None
        binds = cost.terms(_with_chunk(decodes, tokens, context)).binds
        return tokens, Closed.BANDWIDTH if binds == "bandwidth" else Closed.COMPUTE


def _seconds(cost: StepCost, decodes: StepCounts, tokens: int, context: int) -> float:
    return cost.seconds(_with_chunk(decodes, tokens, context))


def _with_chunk(decodes: StepCounts, tokens: int, context: int) -> StepCounts:
    return replace(
        decodes,
        new_tokens=decodes.new_tokens + tokens,
        sampled=decodes.sampled + 1,
        sequences=decodes.sequences + 1,
        prefills=((tokens, context),),
    )
