"""Requests that wait for their grammars, off the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from foliolm.core.request import EngineRequest

WORKERS = 2
"""One slow grammar must not hold up the next."""


@dataclass(slots=True)
class _Group:
    first_id: int
    requests: tuple[EngineRequest, ...]
    done: Future[None]


class CompilingRequests:
    """Groups of requests whose grammars are being compiled while the engine steps on.

    Args:
        prepare: compiles a group's grammars; raises where one is wrong. It is called in other threads.
    """

    def __init__(self, prepare: Callable[[Sequence[EngineRequest]], None]) -> None:
        self._prepare = prepare
        self._groups: list[_Group] = []
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return sum(len(group.requests) for group in self._groups)

    def begin(self, requests: tuple[EngineRequest, ...]) -> None:
        """Compile the grammars of a group."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="foliolm-grammar")
        self._groups.append(_Group(requests[0].request_id, requests, self._pool.submit(self._prepare, requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        """Nobody waits for these any more; ids that are not here are passed over."""
        gone = frozenset(request_ids)
        for group in self._groups:
            group.requests = tuple(request for request in group.requests if request.request_id not in gone)
            if not group.requests:
                group.done.cancel()
        self._groups = [group for group in self._groups if group.requests]

    def take_ready(self) -> list[tuple[int, tuple[EngineRequest, ...], Exception | None]]:
        """First id, requests, and why not, of groups that are compiled or could not be, in order."""
        # Each is asked once: one that ends between two looks would be in neither list.
        ready: list[_Group] = []
        waiting: list[_Group] = []
        for group in self._groups:
            (ready if group.done.done() else waiting).append(group)
        self._groups = waiting
        return [(group.first_id, group.requests, _failure(group.done)) for group in ready]

    def close(self) -> None:
        """Forget all of them, and end the threads."""
        self._groups = []
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _failure(done: Future[None]) -> Exception | None:
    error = done.exception()
    if error is None or isinstance(error, Exception):
        return error
    raise error
