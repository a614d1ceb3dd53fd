"""Whether the client itself keeps up: how late it turns to a request, how long its loop is away, what CPU it takes."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

from foliolm.simulate.spread import summary

BEAT_S = 0.01
_FLOOR_S = 0.005
"""Delays below this are a timer's resolution and a scheduler's turn, on any machine."""
LATE_SHARE = 0.05
"""Of the median time to first token: lateness that would be seen in it."""
LAG_SHARE = 0.1
"""Of the median gap between tokens."""
CPU_SHARE = 0.85


class LoopWatch:
    """Measures, beside everything else, by how much the event loop comes too late to a timer."""

    def __init__(self) -> None:
        self.lags = array("d")
        self._task: asyncio.Task[None] | None = None
        self._began = self._cpu = 0.0
        self.cpu_share = 0.0

    def start(self) -> None:
        """Begin."""
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._task = asyncio.create_task(self._beat())

    def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
        wall = time.monotonic() - self._began
        self.cpu_share = (time.process_time() - self._cpu) / wall if wall > 0 else 0.0

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.lags.append(max(0.0, time.monotonic() - due))


def client_report(
    watch: LoopWatch, late_s: array[float], connect_s: array[float], connections: int, most_in_flight: int
) -> dict[str, Any]:
    """The client's own numbers, in seconds."""
    return {
        "send_late_s": {**summary(late_s), "max": max(late_s, default=None)},
        "connect_s": {**summary(connect_s), "max": max(connect_s, default=None)},
        "loop_lag_s": {**summary(watch.lags), "max": max(watch.lags, default=None)},
        "cpu_share": watch.cpu_share,
        "connections": connections,
        "most_in_flight": most_in_flight,
    }


def bottleneck(client: dict[str, Any], ttft_s: dict[str, float | None], itl_s: dict[str, float | None]) -> list[str]:
    """A sentence for each sign that the numbers are the client's rather than the server's."""
    found = []
    late, lag = client["send_late_s"]["p99"], client["loop_lag_s"]["p99"]
    first, gap = ttft_s["p50"], itl_s["p50"]
    if late is not None and late > max(_FLOOR_S, LATE_SHARE * (first or 0.0)):
        found.append(
            f"requests were sent {_ms(late)} late at the 99th percentile ({_ms(client['send_late_s']['max'])} at "
            f"most), beside a median time to first token of {_ms(first)}"
        )
    if lag is not None and lag > max(_FLOOR_S, LAG_SHARE * (gap or 0.0)):
        found.append(
            f"the client's loop was away for {_ms(lag)} at the 99th percentile ({_ms(client['loop_lag_s']['max'])} at "
            f"most), beside a median gap between tokens of {_ms(gap)}"
        )
    if client["cpu_share"] > CPU_SHARE:
        found.append(f"the client took {client['cpu_share']:.0%} of a core, and has no second one")
    return found


def _ms(value: float | None) -> str:
    return "—" if value is None else f"{value * 1e3:.3g} ms"
