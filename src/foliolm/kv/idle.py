"""Idle blocks in the order in which they were last used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

SLACK = 1024
"""Left-over entries that nobody clears away before they are as many as the blocks themselves."""


class IdleBlocks:
    """A queue of blocks that can be left from the middle; whole tables come and go at once.

    Blocks stand in runs, one a call of ``add``, numbered. Who leaves from the middle stays in its run, and is passed
    over since its number is forgotten or another by then. So to come and to leave costs a dict's entry, and nothing
    else until the run's turn comes.
    """

    def __init__(self) -> None:
        self._run_of: dict[int, int] = {}
        self._runs: deque[tuple[int, list[int]]] = deque()
        self._number = 0
        self._queued = 0  # blocks in runs, those that have left included

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, block: int) -> bool:
        return block in self._run_of

    def __iter__(self) -> Iterator[int]:
        """Longest unused first."""
        for number, run in self._runs:
            for block in reversed(run):
                if self._run_of.get(block) == number:
                    yield block

    def add(self, blocks: list[int]) -> None:
        """Blocks that are not here come to the end of the queue, the last of them first. The list is kept."""
        self._number += 1
        self._run_of.update(dict.fromkeys(blocks, self._number))
        self._runs.append((self._number, blocks))
        self._queued += len(blocks)
        if self._queued > 2 * len(self._run_of) + SLACK:
            self._clear_away()

    def remove(self, block: int) -> None:
        """A block leaves, from wherever it stands.

        Raises:
            KeyError: it is not here.
        """
        del self._run_of[block]

    def oldest(self, most: int) -> list[int]:
        """Up to so many blocks, longest unused first; they stay."""
        runs, run_of = self._runs, self._run_of
        while runs:
            number, run = runs[0]
            while run and run_of.get(run[-1]) != number:
                run.pop()
                self._queued -= 1
            if run:
                break
            runs.popleft()
        found: list[int] = []
        for number, run in runs:
            for block in reversed(run):
                if run_of.get(block) == number:
                    found.append(block)
                    if len(found) >= most:
                        return found
        return found

    def _clear_away(self) -> None:
        run_of = self._run_of
        alive = ((number, [block for block in run if run_of.get(block) == number]) for number, run in self._runs)
        self._runs = deque((number, run) for number, run in alive if run)
        self._queued = len(run_of)
