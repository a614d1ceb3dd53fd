"""What the timelines remember of one open request."""

from __future__ import annotations

import enum

from foliolm.core.request import EngineRequest


class Phase(enum.Enum):
    """What a request is doing, as far as its time goes."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


class Life:
    """One open request's books.

    Attributes:
        request_id, start_ns, queued_ns: who, HTTP accept (or the call), and when it was handed to the engine.
        counted_ns: waiting is booked up to here already.
        phase, since: what it does from step index ``since`` on; earlier steps are booked.
        gaps_from: step index from which gaps are not booked yet.
        offset: while decoding: context minus tick.
        rows: (step index, new tokens, context, sampled) of rows that are not booked yet.
        named: reason code by step index, where a decision named it.
        computed, lost: tokens computed now, and the most that were ever given up.
        moved: step index in which its KV moves to the host, and its share of that step's moves; −1: none.
        num_sampled: tokens sampled in booked steps.
        parts, prefill_of: nanoseconds booked so far.
    """

    __slots__ = (
        "computed",
        "counted_ns",
        "gaps_from",
        "lost",
        "moved",
        "named",
        "num_sampled",
        "offset",
        "parts",
        "phase",
        "prefill_of",
        "queued_ns",
        "request_id",
        "rows",
        "since",
        "start_ns",
    )

    def __init__(self, request: EngineRequest, now: int, index: int) -> None:
        self.request_id = request.request_id
        # Stamps of another clock's origin (or none) are not believed: nothing happens later than now.
        self.queued_ns = request.sent_ns if 0 < request.sent_ns < now else now
        self.start_ns = request.arrival_ns if 0 < request.arrival_ns < self.queued_ns else self.queued_ns
        self.counted_ns = self.queued_ns
        self.phase = Phase.WAITING
        self.since = self.gaps_from = index
        self.offset = self.computed = self.lost = self.num_sampled = 0
        self.moved: tuple[int, float] = (-1, 0.0)
        self.rows: list[tuple[int, int, int, int]] = []
        self.named: dict[int, int] = {}
        self.parts: dict[str, int] = {}
        self.prefill_of: dict[int, int] = {}

    def add(self, part: str, nanoseconds: int) -> None:
        """Book time to a part."""
        if nanoseconds:
            self.parts[part] = self.parts.get(part, 0) + nanoseconds

    def enter(self, phase: Phase, index: int) -> None:
        """From step ``index`` on it does something else; all before is booked."""
        self.phase = phase
        self.since = self.gaps_from = index

    def decode_from(self, index: int, offset: int) -> None:
        """From step ``index`` on it is a steady decode."""
        self.enter(Phase.DECODE, index)
        self.offset = offset
