"""The real clock. Virtual time lives with the simulator."""

from __future__ import annotations

import time


class MonotonicClock:
    """The machine's monotonic clock; one origin for all processes of a machine."""

    def now(self) -> int:
        """Nanoseconds since the machine's monotonic origin."""
        return time.monotonic_ns()
