"""Serving arrivals in virtual time, by the engine's own loop."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from foliolm.core.errors import FolioError, QueueFullError, RequestError
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.valueclass import valueclass
from foliolm.engine.engine import Engine
from foliolm.simulate.clock import VirtualClock


class SimulationError(FolioError):
    """The engine failed in virtual time: a bug, or an executor that raised."""


@valueclass
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
        finished: requests that ended, in the order in which they did; empty where somebody watched.
        refused: (request id, sentence) of those that the scheduler did not take; empty where somebody watched.
    """

    start_ns: int = 0
    end_ns: int = 0
    finished: list[RequestRecord] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)


class Watch(Protocol):
    """Told of everything as it happens, so that a run of any length needs no memory for what is over."""

    def stepped(self, record: StepRecord) -> None:
        """A step was committed."""
        ...

    def leapt(self, leap: Leap) -> None:
        """Like decode steps were committed all at once."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        ...

    def refused(self, request_id: int, why: str, now: int) -> None:
        """The scheduler did not take a request."""
        ...


@valueclass
class Leap:
    """Decode steps of the same requests with nothing else in them.

    Attributes:
        start_ns, end_ns: the clock before and after them.
        times_ns: what each takes; they follow upon each other after ``host_ns`` each.
        host_ns: between two steps.
        num_decodes: rows in each.
        kv_blocks_used: in use after each.
        num_waiting: requests that waited meanwhile.
        reason: why they did.
    """

    start_ns: int
    end_ns: int
    times_ns: Sequence[int]
    host_ns: int
    num_decodes: int
    kv_blocks_used: Sequence[int]
    num_waiting: int
    reason: str


Following = Callable[[RequestRecord, int], Iterable[Arrival]]
RefusedFollowing = Callable[[int, int], Iterable[Arrival]]


def run_arrivals(
    engine: Engine,
    clock: VirtualClock,
    arrivals: Iterable[Arrival],
    following: Following | None = None,
    watch: Watch | None = None,
    after_refusal: RefusedFollowing | None = None,
    leaps: bool = False,
) -> VirtualRun:
    """Serve arrivals until nobody is left. Same inputs give the same run, to the nanosecond.

    Args:
        engine: with a `CostExecutor` on the same clock.
        clock: is advanced.
        arrivals: a list in any order, or a stream in order of time, of which only what is due is taken.
        following: may answer an end with more arrivals (a closed loop): called with the record and the time.
        watch: is told of everything.
        after_refusal: as ``following``, with the refused request's id.
        leaps: runs of like decode steps may be taken at once, and told to ``watch`` as one.

    Raises:
        SimulationError: a request ended with an error.
        RuntimeError: the engine has work and can never get on with it.
    """
    return _Run(engine, clock, arrivals, following, watch, after_refusal, leaps).run()


class _Run:
    """The loop's state; see ``run_arrivals``."""

    def __init__(
        self,
        engine: Engine,
        clock: VirtualClock,
        arrivals: Iterable[Arrival],
        following: Following | None,
        watch: Watch | None,
        after_refusal: RefusedFollowing | None,
        leaps: bool,
    ) -> None:
        self.engine, self.clock, self.watch = engine, clock, watch
        self.following, self.after_refusal = following, after_refusal
        if isinstance(arrivals, Sequence):
            arrivals = sorted(arrivals, key=lambda arrival: arrival.time_ns)
        self.stream: Iterator[Arrival] = iter(arrivals)
        self.next = next(self.stream, None)
        self.numbers = itertools.count()
        self.leaps = leaps and watch is not None
        self.followers: list[tuple[int, int, Arrival]] = []
        self.aborts: list[tuple[int, int]] = []

    def run(self) -> VirtualRun:
        engine, clock = self.engine, self.clock
        due = self.due()
        run = VirtualRun(clock.now() if due is None else due)
        while (due := self.due()) is not None or engine.has_work:
            if not engine.has_work and due is not None:
                clock.advance_to(due)
            now = clock.now()
            while due is not None and due <= now:
                self.take(self.pop(), run)
                due = self.due()
            while self.aborts and self.aborts[0][0] <= now:
                engine.abort([heapq.heappop(self.aborts)[1]])
            if self.leaps and (leap := self.leap(now, due)) is not None:
                self.watch.leapt(leap)  # type: ignore[union-attr]
                if engine.finished:
                    self.close(engine.take_finished(), run)
                continue
            in_flight = len(engine.in_flight)
            engine.step()
            if self.watch is not None and engine.last_record is not None:
                self.watch.stepped(engine.last_record)
            ended = engine.take_finished()
            if ended:
                self.close(ended, run)
            elif engine.last_record is None and len(engine.in_flight) == in_flight and engine.has_work:
                self.wait()
        run.end_ns = clock.now()
        return run

    def leap(self, now: int, due: int | None) -> Leap | None:
        """Like decode steps at once, up to the next arrival or abort."""
        until = due
        if self.aborts:
            until = self.aborts[0][0] if until is None else min(until, self.aborts[0][0])
        taken = self.engine.leap(until)
        if taken is None:
            return None
        rows, times, used, busy = taken
        end = self.clock.now()
        host = (end - now - busy) // len(times)
        scheduler = self.engine.scheduler
        reason = "batch_closed" if scheduler.config.mode == "static" else "sequences"
        return Leap(now, end, times, host, rows, used, scheduler.load()[0], reason)

    def due(self) -> int | None:
        """When the next arrival is due, or None where there is none."""
        if self.next is None:
            return self.followers[0][0] if self.followers else None
        if self.followers and self.followers[0][0] < self.next.time_ns:
            return self.followers[0][0]
        return self.next.time_ns

    def pop(self) -> Arrival:
        """The next arrival; of two at one time, the one that depends on nobody."""
        if self.next is None or (self.followers and self.followers[0][0] < self.next.time_ns):
            return heapq.heappop(self.followers)[2]
        arrival, self.next = self.next, next(self.stream, None)
        return arrival

    def push(self, arrivals: Iterable[Arrival]) -> None:
        """Arrivals that follow upon an end: not before it."""
        now = self.clock.now()
        for arrival in arrivals:
            heapq.heappush(self.followers, (max(arrival.time_ns, now), next(self.numbers), arrival))

    def take(self, arrival: Arrival, run: VirtualRun) -> None:
        """Hand an arrival to the engine."""
        request = arrival.request
        if request.sent_ns != arrival.time_ns:
            request = replace(request, sent_ns=arrival.time_ns)
        try:
            self.engine.add([request])
        except (RequestError, QueueFullError) as error:
            if self.watch is None:
                run.refused.append((request.request_id, str(error)))
            else:
                self.watch.refused(request.request_id, str(error), self.clock.now())
            if self.after_refusal is not None:
                self.push(self.after_refusal(request.request_id, self.clock.now()))
            return
        if arrival.abort_ns is not None:
            heapq.heappush(self.aborts, (arrival.abort_ns, request.request_id))

    def close(self, ended: list[RequestRecord], run: VirtualRun) -> None:
        """Tell of those that ended, and take what follows."""
        for record in ended:
            if record.finish_reason is FinishReason.ERROR:
                raise SimulationError(f"the engine failed in virtual time at request {record.request_id}; see the log")
            if self.watch is None:
                run.finished.append(record)
            else:
                self.watch.ended(record)
            if self.following is not None:
                self.push(self.following(record, self.clock.now()))

    def wait(self) -> None:
        """Nothing ran and nothing ended: time goes on to whatever comes next."""
        later = [time for time in (self.due(), self.aborts[0][0] if self.aborts else None) if time is not None]
        if not later:
            raise RuntimeError("the engine has work, but nothing to run and nothing to wait for")
        self.clock.advance_to(min(later))
