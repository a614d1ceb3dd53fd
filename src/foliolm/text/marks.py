"""Keeps control tokens that a user wrote apart from those that a chat template wrote.

Before a template is rendered, every spelling of a control token in the user's strings is set between two marks:
characters for private use that occur nowhere else in the request. They travel through the template with the text. Then
they are taken out again, and what stood between them is known to be the user's. So the template sees the user's text
with its words intact, the rendered text is what it would have been without marks, and only the tokenising differs.

A user's string may also end with the first half of a control token, or begin with the second, so that the template's
text beside it would complete it: such ends are marked as well.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from foliolm.core.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF900)
# Keys whose values a template compares with words of its own.
_NAMES = frozenset(("role", "type"))

Span = tuple[int, int]


class ControlTokens:
    """The spellings of a tokenizer's control tokens, ready to be looked for.

    Args:
        spellings: one or more characters each.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = sorted(spellings, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.spellings)) or r"(?!)")
        self.longest = max(map(len, self.spellings), default=0)
        self.beginnings = {token[:length] for token in self.spellings for length in range(1, len(token))}
        self.endings = {token[length:] for token in self.spellings for length in range(1, len(token))}

    def spans(self, text: str) -> list[Span]:
        """Where control tokens are spelt out in a text, those that overlap each other joined."""
        found: list[Span] = []
        at = 0
        while match := self.pattern.search(text, at):
            found.append(match.span())
            at = match.start() + 1
        return _joined(found)

    def ends(self, text: str) -> list[Span]:
        """The stretches at a text's ends that text beside it could complete to a control token."""
        found: list[Span] = []
        for length in range(min(len(text), self.longest - 1), 0, -1):
            if text[:length] in self.endings:
                found.append((0, length))
                break
        for length in range(min(len(text), self.longest - 1), 0, -1):
            if text[-length:] in self.beginnings:
                found.append((len(text) - length, len(text)))
                break
        return found

    def split(self, text: str, protected: list[Span]) -> Iterator[tuple[str, bool]]:
        """Cut a text into stretches and control tokens (True).

        Args:
            text: a rendered template.
            protected: spans, in order and apart, that no control token may touch.
        """
        begin = at = 0
        while match := self.pattern.search(text, at):
            if _touches(match.span(), protected):
                at = match.start() + 1
                continue
            yield text[begin : match.start()], False
            yield match[0], True
            begin = at = match.end()
        yield text[begin:], False

    def touch(self, text: str, protected: list[Span]) -> bool:
        """Whether a control token is spelt out in, or across an end of, any of the protected spans."""
        reach = self.longest - 1
        for low, high in protected:
            window = text[max(0, low - reach) : high + reach]
            shift = max(0, low - reach)
            if any(_touches((a + shift, b + shift), protected) for a, b in self.spans(window)):
                return True
        return False


class Marks:
    """The marks of one request.

    Args:
        control: what to mark.
        inputs: everything that the template can see, and its own source.

    Raises:
        RequestError: the texts use all characters for private use, so that none is left as a mark.
    """

    def __init__(self, control: ControlTokens, inputs: Any) -> None:
        self.control = control
        everything = "\n".join(_strings(inputs))
        lowered = everything.lower()
        free = (chr(c) for c in _PRIVATE_USE if chr(c) not in everything and f"\\u{c:04x}" not in lowered)
        self.begin, self.end = next(free, ""), next(free, "")
        if not self.end:
            raise RequestError("the messages use every character of Unicode's private use area", "messages")

    def mark(self, value: Any, key: str | None = None) -> Any:
        """A copy of a string, or of a structure of them, with the marks set."""
        if isinstance(value, str):
            ends = [] if key in _NAMES else self.control.ends(value)
            return self._set(value, _joined(self.control.spans(value) + ends))
        if isinstance(value, Mapping):
            return {self._mark_key(name): self.mark(entry, name) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(entry, key) for entry in value]
        return value

    def unmark(self, text: str) -> tuple[str, list[Span]]:
        """The text without marks, and the spans of it that are the user's and must not be control tokens."""
        for mark in (self.begin, self.end):  # a template may have written strings as ASCII JSON, the marks with them
            for escaped in (f"\\u{ord(mark):04x}", f"\\u{ord(mark):04X}"):
                text = text.replace(escaped, mark)
        parts: list[str] = []
        spans: list[Span] = []
        opened: int | None = None
        length = 0
        for piece in re.split(f"([{self.begin}{self.end}])", text):
            if piece == self.begin:
                opened = length
            elif piece == self.end:
                if opened is not None and opened < length:
                    spans.append((opened, length))
                opened = None
            else:
                parts.append(piece)
                length += len(piece)
        return "".join(parts), spans

    def _mark_key(self, key: Any) -> Any:
        """A key that a template could not ask for by name may be a user's own: a property of a tool, an argument."""
        return self.mark(key) if isinstance(key, str) and not key.isidentifier() else key

    def _set(self, text: str, spans: list[Span]) -> str:
        parts: list[str] = []
        at = 0
        for low, high in spans:
            parts += (text[at:low], self.begin, text[low:high], self.end)
            at = high
        return "".join([*parts, text[at:]]) if parts else text


def _touches(span: Span, protected: list[Span]) -> bool:
    """Whether a span shares a character with one of the protected ones, which are in order and apart."""
    last = bisect_left(protected, (span[1], 0)) - 1  # the last that begins before the span ends
    return last >= 0 and protected[last][1] > span[0]


def _joined(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _strings(name)
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
