"""Virtual time: integer nanoseconds that pass only when told to."""

from __future__ import annotations


class VirtualClock:
    """A clock that never reads wall time.

    Args:
        start_ns: where it begins.
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now = start_ns

    def now(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return self._now

    def advance_to(self, time_ns: int) -> None:
        """Let time pass until ``time_ns``; it never goes back."""
        self._now = max(self._now, time_ns)
