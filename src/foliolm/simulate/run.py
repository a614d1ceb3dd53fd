"""Serving arrivals in virtual time, by the engine's own loop."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from foliolm.core.errors import QueueFullError, RequestError
from foliolm.core.record import RequestRecord
from foliolm.core.request import EngineRequest
from foliolm.engine.engine import Engine
from foliolm.simulate.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it reaches the engine's queue.

    Attributes:
        time_ns: virtual time.
        request: its ``arrival_ns`` may be earlier, by what the HTTP side takes.
        abort_ns: virtual time at which its client leaves, or None.
    """

    time_ns: int
    request: EngineRequest
    abort_ns: int | None = None


@dataclass(slots=True)
class VirtualRun:
    """What came of it.

    Attributes:
        start_ns, end_ns: the first arrival, and the last commit.
        finished: requests that ended, in the order in which they did.
        refused: (request id, sentence) of those that the scheduler did not take.
    """

    start_ns: int = 0
    end_ns: int = 0
    finished: list[RequestRecord] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)


Following = Callable[[RequestRecord, int], Iterable[Arrival]]


def run_arrivals(
    engine: Engine, clock: VirtualClock, arrivals: Iterable[Arrival], following: Following | None = None
) -> VirtualRun:
    """Serve arrivals until nobody is left. Same inputs give the same run, to the nanosecond.

    Args:
        engine: with a `CostExecutor` on the same clock.
        clock: is advanced.
        arrivals: in any order.
        following: may answer an end with more arrivals (a closed loop): called with the record and the time.

    Raises:
        RuntimeError: the engine has work and can never get on with it.
    """
    numbers = itertools.count()
    due = [(arrival.time_ns, next(numbers), arrival) for arrival in arrivals]
    heapq.heapify(due)
    aborts: list[tuple[int, int]] = []
    run = VirtualRun(due[0][0] if due else clock.now())
    while due or engine.has_work:
        if not engine.has_work:
            clock.advance_to(due[0][0])
        while due and due[0][0] <= clock.now():
            _take(engine, heapq.heappop(due)[2], aborts, run)
        while aborts and aborts[0][0] <= clock.now():
            engine.abort([heapq.heappop(aborts)[1]])
        in_flight = len(engine.in_flight)
        engine.step()
        ended = engine.take_finished()
        run.finished += ended
        for record in ended if following is not None else ():
            for arrival in following(record, clock.now()):  # type: ignore[misc]
                heapq.heappush(due, (max(arrival.time_ns, clock.now()), next(numbers), arrival))
        stalled = engine.last_record is None and not ended and len(engine.in_flight) == in_flight
        if stalled and engine.has_work:
            later = [entry[0] for entry in due[:1]] + [entry[0] for entry in aborts[:1]]
            if not later:
                raise RuntimeError("the engine has work, but nothing to run and nothing to wait for")
            clock.advance_to(min(later))
    run.end_ns = clock.now()
    return run


def _take(engine: Engine, arrival: Arrival, aborts: list[tuple[int, int]], run: VirtualRun) -> None:
    try:
        engine.add([replace(arrival.request, sent_ns=arrival.time_ns)])
    except (RequestError, QueueFullError) as error:
        run.refused.append((arrival.request.request_id, str(error)))
        return
    if arrival.abort_ns is not None:
        heapq.heappush(aborts, (arrival.abort_ns, arrival.request.request_id))
