"""Requests that wait, in the order of the policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from foliolm.scheduler.request import Request, State

LOOKED_AT = 32
"""Requests from the front of the queue among which a rank chooses: a bound on a step's work."""

Rank = float | tuple[float, ...]
"""Of a request; smaller comes first. All of a queue's are of one kind."""

_Entry = tuple[tuple[int, bool, int, int], int, Request]


class WaitingQueue:
    """A heap a tenant by ``Request.order``. A preempted request keeps its order, so it comes back to its own place.

    One whose KV waits on the host comes before all others of its priority. Leaving from the middle (an abort) is lazy:
    the entry is dropped when it comes to the top. ``rank_by`` lets another rule choose among the first ``LOOKED_AT`` in
    order of one priority.

    Attributes:
        now: the clock of the plan in the making, ns; ages are counted by it.

    Args:
        age_bound_ns: who waited so long comes first, whatever else is said; None: order alone keeps everybody moving.
        turn: of the tenants that have somebody waiting, whose turn it is; None: tenants are not told apart.
    """

    def __init__(
        self,
        age_bound_ns: int | None = None,
        turn: Callable[[Iterator[str]], str] | None = None,
    ) -> None:
        self.now = 0
        self._age_bound_ns = age_bound_ns
        self._turn = turn
        self._rank: Callable[[Request], Rank] | None = None
        self._heaps: dict[str, list[_Entry]] = {}
        self._by_age: list[tuple[int, int, Request]] = []
        self._numbers = 0
        self._count = 0

    def rank_by(self, rank: Callable[[Request], Rank]) -> None:
        """Let a rank choose among the first in order."""
        self._rank = rank

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Put a request at its place; its state must be WAITING."""
        self._numbers += 1
        request.queue_entry = self._numbers
        priority, arrival, number = request.order
        tenant = request.source.tenant if self._turn is not None else ""
        key = (priority, not request.is_swapped, arrival, number)
        heapq.heappush(self._heaps.setdefault(tenant, []), (key, self._numbers, request))
        if self._age_bound_ns is not None:
            heapq.heappush(self._by_age, (request.queued_ns, self._numbers, request))
        self._count += 1

    def head(self) -> Request | None:
        """Who comes next, or None."""
        if not self._count:
            return None
        aged = self._aged()
        if aged is not None:
            return aged
        heap = self._heap()
        return None if not heap else heap[0][2] if self._rank is None else self._best(heap, self._rank)

    def take(self, request: Request) -> None:
        """A waiting request leaves, to be started or put back."""
        request.queue_entry = 0
        self._count -= 1

    def forget(self, request: Request) -> None:
        """A waiting request leaves from wherever it stands. The caller moves it out of WAITING."""
        self.take(request)

    def __iter__(self) -> Iterator[Request]:
        """Those who wait, in no particular order."""
        return (entry[2] for heap in self._heaps.values() for entry in heap if _waits(entry[2], entry[1]))

    def _aged(self) -> Request | None:
        by_age = self._by_age
        while by_age and not _waits(by_age[0][2], by_age[0][1]):
            heapq.heappop(by_age)
        if by_age and self._age_bound_ns is not None and self.now - by_age[0][0] >= self._age_bound_ns:
            return by_age[0][2]
        return None

    def _heap(self) -> list[_Entry]:
        for tenant, heap in list(self._heaps.items()):
            while heap and not _waits(heap[0][2], heap[0][1]):
                heapq.heappop(heap)
            if not heap:
                del self._heaps[tenant]
        if not self._heaps:
            return []
        return self._heaps["" if self._turn is None else self._turn(iter(self._heaps))]

    @staticmethod
    def _best(heap: list[_Entry], rank: Callable[[Request], Rank]) -> Request:
        first = heap[0]
        if not first[0][1]:
            return first[2]  # its KV is on the host
        entries = heapq.nsmallest(LOOKED_AT, heap) if len(heap) > LOOKED_AT else heap
        same = [entry for entry in entries if entry[0][0] == first[0][0] and _waits(entry[2], entry[1])]
        return min(same, key=lambda entry: (rank(entry[2]), entry[0]))[2]


def _waits(request: Request, number: int) -> bool:
    return request.queue_entry == number and request.state is State.WAITING
