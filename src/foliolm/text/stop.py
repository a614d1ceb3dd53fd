"""Stop strings, found in text that comes in parts."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the stop string that is completed first, whatever the parts that the text comes in.

    Text that may yet turn out to be the beginning of a stop string is held back, and nothing more. Each string is
    matched by Knuth, Morris & Pratt's automaton (1977), so that work and memory are linear in the text and the strings.

    Args:
        stops: the stop strings; none may be empty.
        include: the stop string that was found belongs to the text.
        min_tokens: one that is completed before this many tokens is ordinary text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        # Of several that end at one place, the one that begins first is found: the longest.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._min_tokens = min_tokens
        self._borders = tuple(map(_borders, self._stops))
        self._matched = [0] * len(self._stops)
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
        for position, character in enumerate(text, known + 1):
            completed = self._advance(character)
            if completed is not None and num_tokens >= self._min_tokens:
                self.found, self._held = completed, ""
                return whole[:position] if self._include else whole[: position - len(completed)]
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """One more character; the stop string that it completes, if it does."""
        completed = None
        for number, stop in enumerate(self._stops):
            borders, matched = self._borders[number], self._matched[number]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                completed = completed or stop
                matched = borders[matched - 1]
            self._matched[number] = matched
        return completed


def _borders(stop: str) -> list[int]:
    """For each prefix of a string, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[position] != stop[matched]:
            matched = borders[matched - 1]
        matched += stop[position] == stop[matched]
        borders[position] = matched
    return borders
