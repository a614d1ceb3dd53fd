"""Questions to engines in other processes, and who waits for the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from foliolm.core.errors import EngineDeadError
from foliolm.engine.messages import Failure

Answer = dict[str, Any]


class Questions:
    """Open questions by number. All on one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[int, asyncio.Future[Answer]]] = {}

    def open(self, engine: int) -> tuple[int, asyncio.Future[Answer]]:
        """A new question to an engine: its number, and what will hold the answer."""
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._open.pop(number, None))
        self._open[number] = (engine, future)
        return number, future

    def take(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """An engine answered."""
        for number, answer in answers:
            entry = self._open.get(number)
            if entry is not None and not entry[1].done():
                failure = answer.get("failure")
                if failure is None:
                    entry[1].set_result(answer)
                else:
                    entry[1].set_exception(Failure(*failure).error())

    def fail(self, engine: int, error: EngineDeadError) -> None:
        """An engine is gone; it answers nothing any more."""
        for where, future in list(self._open.values()):
            if where == engine and not future.done():
                future.set_exception(error)
