"""Committed steps as columns, from the oldest step that an open request still needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FLOATS = ("whole", "no_prompts", "decode_s", "decode_mixed_s", "prompt_s", "swap_s")
_INTS = (
    "start",
    "end",
    "gap",
    "time",
    "tick",
    "decodes",
    "prompt_tokens",
    "prompt_samples",
    "prompt_rows",
    "chunks",
    "wait",
    "skip",
)


MOST_PENDING = 256
"""Steps that wait to be sorted into the columns."""


class StepColumns:
    """Growing columns, one entry a step.

    A step is kept as it came until somebody reads: its caller pays for one append, and not for an entry a column.

    Attributes (arrays, as long as there are steps):
        end: clock at its commit; start: ``end − time``; gap: nanoseconds from the commit before it to its start.
        time: T, nanoseconds.
        tick, decodes: the steady decodes' tick and number.
        prompt_tokens, prompt_samples, prompt_rows, chunks: of the other rows: new tokens, sampled rows, rows, and rows
            of more than one token.
        wait, skip: code of the reason for whoever waited, and for decodes left out.
        whole, no_prompts: predicted seconds of the plan, and of the plan without its other rows; both without swaps.
        swap_s: predicted seconds of its blocks' moves between device and host.
        decode_s, decode_mixed_s, prompt_s: seconds of attention: of the decodes, in a step without and with chunks, and
            of the other rows.
        rows: (request id, new tokens) of each other row.
    """

    def __init__(self) -> None:
        self._size = 64
        self._columns: dict[str, npt.NDArray[Any]] = {
            **{name: np.zeros(self._size, np.float64) for name in _FLOATS},
            **{name: np.zeros(self._size, np.int64) for name in _INTS},
        }
        self._pending: list[dict[str, float]] = []  # the newest steps, not in the columns yet
        self.rows: list[tuple[tuple[int, int], ...]] = []
        self.count = 0
        self.first_end = 0  # the commit before the first step kept

    def append(self, rows: tuple[tuple[int, int], ...], **values: float) -> int:
        """One more step; returns its index."""
        if len(self._pending) >= MOST_PENDING:
            self._sort()
        self._pending.append(values)
        self.rows.append(rows)
        self.count += 1
        return self.count - 1

    def _sort(self) -> None:
        """Put the steps that wait into the columns."""
        if not self._pending:
            return
        begin = self.count - len(self._pending)
        while self._size < self.count:
            self._size *= 2
            self._columns = {name: np.resize(column, self._size) for name, column in self._columns.items()}
        for name, column in self._columns.items():
            column[begin : self.count] = [values[name] for values in self._pending]
        self._pending.clear()

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        """A column as it is now."""
        self._sort()
        return self._columns[name][: self.count]

    def seconds(self, name: str) -> npt.NDArray[np.float64]:
        """A column of seconds as it is now."""
        self._sort()
        return self._columns[name][: self.count]

    def swap_times(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Nanoseconds of steps that went into moving blocks: ``T · t(swaps) / t(plan)``."""
        swap = self.seconds("swap_s")[at]
        if not swap.any():
            return np.zeros(len(at), np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(swap > 0, swap / (swap + self.seconds("whole")[at]), 0.0)
        return np.rint(self["time"][at] * share).astype(np.int64)

    @property
    def last_end(self) -> int:
        """The newest commit; 0 before the first."""
        if self._pending:
            return int(self._pending[-1]["end"])
        return int(self._columns["end"][self.count - 1]) if self.count else self.first_end

    def drop_last(self) -> None:
        """Forget the newest step."""
        if self._pending:
            self._pending.pop()
        self.count -= 1
        self.rows.pop()

    def clear(self) -> None:
        """Forget all steps; indices begin at 0 again."""
        self.first_end = self.last_end
        self._pending.clear()
        self.rows = []
        self.count = 0
