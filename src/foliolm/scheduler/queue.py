"""Requests that wait, in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from foliolm.scheduler.request import Request, State


class WaitingQueue:
    """A heap by ``Request.order``. A preempted request keeps its order, so that it comes back to its own place.

    One whose KV waits on the host comes before all others of its priority.

    Leaving from the middle (an abort) is lazy: the entry is dropped when it comes to the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, int, int], Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Put a request at its place; its state must be WAITING."""
        priority, arrival, number = request.order
        heapq.heappush(self._heap, ((priority, not request.is_swapped, arrival, number), request))
        self._count += 1

    def head(self) -> Request | None:
        """The first in order, or None."""
        heap = self._heap
        while heap and heap[0][1].state is not State.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Take the first in order; raises IndexError if nobody waits."""
        if self.head() is None:
            raise IndexError("nobody waits")
        self._count -= 1
        return heapq.heappop(self._heap)[1]

    def forget(self, request: Request) -> None:
        """A waiting request leaves from wherever it stands. The caller moves it out of WAITING."""
        self._count -= 1

    def __iter__(self) -> Iterator[Request]:
        """Those who wait, in no particular order."""
        return (request for _, request in self._heap if request.state is State.WAITING)
