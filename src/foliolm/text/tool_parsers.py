"""Parsers of tool calls by the name of the format that models write them in."""

from __future__ import annotations

from collections.abc import Callable, Collection

from foliolm.text.call_scanner import CallScanner
from foliolm.text.tool_events import TextPart, ToolEvent, ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Calls between ``<tool_call>`` and ``</tool_call>``, text around them: Hermes, Qwen, SmolLM and their kin.

    Whitespace between calls, and between text and a call, is no part of the text.

    Args:
        names: of the tools that may be called; a call of any other stays text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not decided yet: whitespace, and what may be the beginning of a tag
        self._scanner: CallScanner | None = None
        self._raw = ""  # of the call being read, as long as it may yet turn out to be text
        self._count = 0
        self._closing = False
        self._trimming = False

    def push(self, text: str) -> list[ToolEvent]:
        """What is certain after this text."""
        events: list[ToolEvent] = []
        while text:
            text = self._in_call(text, events) if self._scanner is not None else self._outside(text, events)
        return events

    def flush(self) -> list[ToolEvent]:
        """What was held back."""
        events: list[ToolEvent] = []
        if self._scanner is not None and not self._scanner.begun:
            self._text = self._text + self._raw
            self._scanner = None
        if self._scanner is None and self._text and not (self._closing and END.startswith(self._text.strip())):
            events.append(TextPart(self._text))
        self._text = ""
        return events

    def _outside(self, text: str, events: list[ToolEvent]) -> str:
        whole = self._text + text
        self._text = ""
        if self._closing:
            stripped = whole.lstrip()
            if stripped.startswith(END):
                whole, self._closing, self._trimming = stripped[len(END) :], False, True
            elif END.startswith(stripped):
                self._text = whole
                return ""
            else:
                self._closing = False
        if self._trimming:
            whole = whole.lstrip()
            if not whole:
                return ""
            self._trimming = False
        before, tag, after = whole.partition(BEGIN)
        if tag:
            if before.strip():
                events.append(TextPart(before.rstrip()))
            self._scanner, self._raw = CallScanner(self._count, self._names), before[len(before.rstrip()) :] + BEGIN
            return after
        keep = _undecided(whole)
        if len(whole) > keep:
            events.append(TextPart(whole[: len(whole) - keep]))
        self._text = whole[len(whole) - keep :]
        return ""

    def _in_call(self, text: str, events: list[ToolEvent]) -> str:
        assert self._scanner is not None
        read, found = self._scanner.push(text)
        events += found
        self._raw += text[:read]
        if self._scanner.failed:
            if not self._scanner.begun:
                events.append(TextPart(self._raw))
            self._count += self._scanner.begun  # what was announced cannot be taken back; it stays without an end
            self._scanner = None
        elif self._scanner.done:
            self._scanner, self._count, self._closing = None, self._count + 1, True
        return text[read:]


class PlainJsonParser:
    """An answer that is nothing but a call, or a list of calls, in JSON: Llama 3 and its kin. Anything else is text.

    Args:
        names: of the tools that may be called; a call of any other stays text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._lead = ""
        self._raw = ""
        self._scanner: CallScanner | None = None
        self._count = 0
        self._is_text = False

    def push(self, text: str) -> list[ToolEvent]:
        """What is certain after this text."""
        events: list[ToolEvent] = []
        while text:
            if self._is_text:
                events.append(TextPart(text))
                return events
            text = self._between(text, events) if self._scanner is None else self._in_call(text, events)
        return events

    def flush(self) -> list[ToolEvent]:
        """What was held back."""
        pending = self._lead + ("" if self._scanner is None or self._scanner.begun else self._raw)
        self._lead = ""
        kept = pending.strip() if self._count else pending
        return [TextPart(pending)] if kept and not (self._count and kept in "],;") else []

    def _between(self, text: str, events: list[ToolEvent]) -> str:
        """Before a call: whitespace, the beginning of a list, or what separates two calls."""
        separators = " \t\r\n[" if not self._count else " \t\r\n,;]"
        for position, character in enumerate(text):
            if character == "{":
                self._scanner, self._raw = CallScanner(self._count, self._names), self._lead + text[:position]
                self._lead = ""
                return text[position:]
            if character not in separators or (character == "[" and "[" in self._lead + text[:position]):
                self._is_text = True
                lead, self._lead = self._lead, ""
                if lead:
                    events.append(TextPart(lead))
                return text
        self._lead += text
        return ""

    def _in_call(self, text: str, events: list[ToolEvent]) -> str:
        assert self._scanner is not None
        read, found = self._scanner.push(text)
        events += found
        self._raw += text[:read]
        if self._scanner.failed:
            if not self._scanner.begun:
                events.append(TextPart(self._raw))
            self._scanner, self._is_text = None, True
        elif self._scanner.done:
            self._scanner, self._count = None, self._count + 1
        return text[read:]


TOOL_PARSERS: dict[str, Callable[[Collection[str]], ToolParser]] = {"hermes": HermesParser, "json": PlainJsonParser}


def _undecided(text: str) -> int:
    """Length of the end of a text that may belong to a call: whitespace, then what a tag may begin with."""
    for length in range(min(len(text), len(BEGIN) - 1), 0, -1):
        if BEGIN.startswith(text[-length:]):
            head = text[:-length]
            return length + len(head) - len(head.rstrip())
    return len(text) - len(text.rstrip())
