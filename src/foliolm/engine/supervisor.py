"""Watching over engines in processes of their own: which of them answers, and which is started again."""

from __future__ import annotations

import enum
import time
from collections import deque
from dataclasses import dataclass, field

from foliolm.core.errors import EngineDeadError
from foliolm.engine.messages import EngineStats


class EngineState(enum.StrEnum):
    """How an engine is, seen from outside. The first two take requests."""

    IDLE = "idle"
    BUSY = "busy"
    STUCK = "stuck"
    RESTARTING = "restarting"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Supervision:
    """How patient the parent of an engine is.

    Attributes:
        max_restarts: how often an engine may be started again within ``window_s``; 0: never.
        window_s: seconds after which a restart no longer counts.
        backoff_s: seconds before the second try in a row, doubled for each one after it; the first is made at once.
        stuck_after_s: an engine that has not answered for this long is stuck; after twice as long it is killed, which
            ends its requests with an error and starts it again. 0: it may be silent for ever.
    """

    max_restarts: int = 5
    window_s: float = 600.0
    backoff_s: float = 1.0
    stuck_after_s: float = 60.0

    @property
    def ping_interval_s(self) -> float:
        """Seconds between two questions whether an engine lives."""
        return min(1.0, self.stuck_after_s / 4) if self.stuck_after_s else 1.0


@dataclass(slots=True)
class EngineWatch:
    """What the parent remembers of one engine. Times are of the monotonic clock, in seconds.

    Attributes:
        supervision: how patient to be.
        restarting: a fresh process is being started.
        num_restarts: how often one was started, over the whole life.
        heard_s: when the engine last said anything.
        asked_s: when it was asked what it has not answered yet; None: it owes no answer.
    """

    supervision: Supervision
    restarting: bool = False
    num_restarts: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    asked_s: float | None = None
    _tries: deque[float] = field(default_factory=deque)

    def heard(self) -> None:
        """The engine said something."""
        self.heard_s = time.monotonic()
        self.asked_s = None

    def asked(self) -> None:
        """The engine was asked whether it lives."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds for which it has owed an answer."""
        return 0.0 if self.asked_s is None else time.monotonic() - self.asked_s

    @property
    def stuck(self) -> bool:
        """It has owed an answer for too long."""
        limit = self.supervision.stuck_after_s
        return bool(limit) and self.silent_s > limit

    @property
    def hopeless(self) -> bool:
        """It has owed an answer for so long that it is better killed."""
        limit = self.supervision.stuck_after_s
        return bool(limit) and self.silent_s > 2 * limit

    def next_try(self) -> float | None:
        """Seconds to wait before starting the engine again, which then counts as a try; None: there were too many."""
        now, supervision = time.monotonic(), self.supervision
        while self._tries and now - self._tries[0] > supervision.window_s:
            self._tries.popleft()
        before = len(self._tries)
        if before >= supervision.max_restarts:
            return None
        self._tries.append(now)
        return 0.0 if before == 0 else min(30.0, supervision.backoff_s * 2.0 ** (before - 1))


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine is now.

    Attributes:
        state: whether it answers.
        stats: what it last said of itself.
        silent_s: seconds for which it has owed an answer.
        num_restarts: how often its process was started again.
        error: why it takes no requests, where it does not.
    """

    state: EngineState
    stats: EngineStats
    silent_s: float
    num_restarts: int
    error: EngineDeadError | None


class DrainRate:
    """How fast requests end, for an honest ``Retry-After``."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def ended(self, count: int) -> None:
        """``count`` requests have just ended."""
        self._ends.extend([time.monotonic()] * count)

    def seconds_for(self, num_waiting: int) -> int:
        """Whole seconds, from 1 to 60, in which as many as wait now will have had their turn, at the latest rate."""
        now = time.monotonic()
        recent = [end for end in self._ends if now - end <= 60.0]
        if not recent:
            return 5
        per_second = len(recent) / max(now - recent[0], 1.0)
        return max(1, min(60, round(num_waiting / per_second)))
