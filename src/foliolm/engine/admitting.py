"""Orders to load adapters, and requests that wait for room in host memory for theirs: both beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from foliolm.core.adapter import AdapterSize
from foliolm.core.request import EngineRequest
from foliolm.engine.engine import Engine
from foliolm.engine.messages import Ask, Failure


@dataclass(frozen=True, slots=True)
class _Load:
    ask: Ask
    read: Future[AdapterSize]


class AdapterOrders:
    """Loads that are being read, in one thread: they come into force in the order in which they were given.

    Args:
        engine: takes them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loads: deque[_Load] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, ask: Ask) -> None:
        """Begin to read an adapter."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="foliolm-adapter")
        order = ask.arguments
        read = self._pool.submit(self._engine.read_adapter, order["load_id"], order["name"], order["path"])
        self._loads.append(_Load(ask, read))

    def take_done(self) -> list[tuple[int, dict[str, Any]]]:
        """(number, answer) of those that have been read, or cannot be."""
        answers = []
        while self._loads and self._loads[0].read.done():
            load = self._loads.popleft()
            order = load.ask.arguments
            try:
                size = load.read.result()
                self._engine.load_adapter(order["load_id"], order["path"], size)
                answer: dict[str, Any] = {"bytes": size.num_bytes, "rank": size.rank}
            except Exception as error:
                failure = Failure.of(error)
                answer = {"failure": [failure.kind, failure.message, failure.field, failure.code]}
            answers.append((load.ask.number, answer))
        return answers

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class HostQueue:
    """Groups of requests that wait for host memory for their adapters, strictly in order: while one waits, no later
    group with an adapter passes it, so that adapters in use become fewer until it fits.

    Args:
        engine: whose host memory.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: deque[tuple[int, tuple[EngineRequest, ...]]] = deque()

    def __len__(self) -> int:
        return sum(len(requests) for _, requests in self._groups)

    def must_wait(self, requests: Sequence[EngineRequest]) -> bool:
        """Whether a group has to wait, for room or for those before it."""
        if all(request.adapter is None for request in requests):
            return False
        return bool(self._groups) or not self._engine.has_room(requests)

    def push(self, first_id: int, requests: tuple[EngineRequest, ...]) -> None:
        """A group waits."""
        self._groups.append((first_id, requests))

    def pop(self) -> tuple[int, tuple[EngineRequest, ...]] | None:
        """The first group, if there is room for it now."""
        if self._groups and self._engine.has_room(self._groups[0][1]):
            return self._groups.popleft()
        return None

    def abort(self, request_ids: Sequence[int]) -> None:
        """Nobody waits for these any more; ids that are not here are passed over."""
        if not self._groups:
            return
        gone = frozenset(request_ids)
        kept = ((first, tuple(r for r in requests if r.request_id not in gone)) for first, requests in self._groups)
        self._groups = deque((first, requests) for first, requests in kept if requests)
