"""Which sink takes a request's outputs, and which engine has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from foliolm.core.errors import EngineDeadError
from foliolm.core.plan import Decision
from foliolm.core.request import EngineRequest, TokenOutput


class OutputSink(Protocol):
    """Takes what comes of one request. It must not block: it is called from the loop that serves everybody."""

    def on_output(self, output: TokenOutput) -> None:
        """One step's tokens; the last call has a finish reason."""
        ...

    def on_decision(self, decision: Decision) -> None:
        """The scheduler let the request in, or took its memory; only an engine in its own process reports it."""
        ...

    def on_error(self, error: EngineDeadError) -> None:
        """The engine is gone; no other call follows."""
        ...


class RequestRouter:
    """Gives requests their numbers, spreads them over engines, and routes what comes back.

    Args:
        num_engines: how many engines the client holds.
    """

    def __init__(self, num_engines: int) -> None:
        self._ids = itertools.count(1)
        self._sinks: dict[int, tuple[OutputSink, int]] = {}
        self._open: list[int] = [0] * num_engines

    def next_id(self) -> int:
        """A request id that this client never gave before."""
        return next(self._ids)

    @property
    def num_open(self) -> int:
        """Requests that have a sink."""
        return len(self._sinks)

    def choose(self, alive: Iterable[int]) -> int:
        """The engine, among those alive, with the fewest open requests.

        Raises:
            EngineDeadError: none is alive.
        """
        candidates = list(alive)
        if not candidates:
            raise EngineDeadError("no engine is alive")
        return min(candidates, key=lambda engine: self._open[engine])

    def numbered(self, requests: Sequence[EngineRequest]) -> tuple[EngineRequest, ...]:
        """The requests with ids of this client."""
        return tuple(replace(request, request_id=self.next_id()) for request in requests)

    def open(self, request_id: int, sink: OutputSink, engine: int) -> None:
        """From now on the request's outputs go to ``sink``."""
        self._sinks[request_id] = (sink, engine)
        self._open[engine] += 1

    def close(self, request_id: int) -> int | None:
        """Forget a request; returns the engine that has it, or None where it is unknown (ended, or never opened)."""
        entry = self._sinks.pop(request_id, None)
        if entry is None:
            return None
        self._open[entry[1]] -= 1
        return entry[1]

    def route(self, output: TokenOutput) -> None:
        """Hand an output to its sink; outputs of requests that nobody waits for are dropped."""
        entry = self._sinks.get(output.request_id)
        if entry is None:
            return
        entry[0].on_output(output)
        if output.finish_reason is not None:
            self.close(output.request_id)

    def sink(self, request_id: int) -> OutputSink | None:
        """Who takes a request's outputs; None where it is unknown."""
        entry = self._sinks.get(request_id)
        return None if entry is None else entry[0]

    def fail_engine(self, engine: int, error: EngineDeadError) -> None:
        """Every open request of an engine gets the error."""
        lost = [request_id for request_id, (_, where) in self._sinks.items() if where == engine]
        for request_id in lost:
            sink, _ = self._sinks[request_id]
            self.close(request_id)
            sink.on_error(error)
