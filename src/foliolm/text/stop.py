"""Stop strings, found in text that comes in parts."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the stop string that is completed first, whatever the parts that the text comes in.

    Text that may yet turn out to be the beginning of a stop string is held back, and nothing more.

    Args:
        stops: the stop strings; none may be empty.
        include: the stop string that was found belongs to the text.
        min_tokens: one that is completed before this many tokens is ordinary text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._beginnings = frozenset(stop[:length] for stop in self._stops for length in range(1, len(stop)))
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, num_tokens: int) -> str:
        """Take new text; give back what is certain.

        Args:
            text: what came.
            num_tokens: tokens generated so far, those that ``text`` came of included.

        Once a stop string is found (``found``), the text ends there, and nothing more may be pushed.
        """
        if not self._stops or not text:
            return text
        known = len(self._held)
        whole = self._held + text
        if num_tokens >= self._min_tokens:
            match = self._first_completed(whole, known)
            if match is not None:
                begin, self.found = match
                self._held = ""
                return whole[: begin + len(self.found)] if self._include else whole[:begin]
        keep = self._undecided(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str, known: int) -> tuple[int, str] | None:
        """Begin and text of the match that ends first, after the ``known`` characters; of several, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = text.find(stop, max(0, known - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        return None if best is None else (best[1], best[2])

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
