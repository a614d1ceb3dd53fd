"""What a parser of tool calls makes of a model's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool. ``index`` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """A call is complete."""

    index: int


ToolEvent = TextPart | CallBegins | CallArguments | CallEnds


class ToolParser(Protocol):
    """Finds tool calls in text that comes in parts. What it gives does not depend on how the text was cut."""

    def push(self, text: str) -> list[ToolEvent]:
        """What is certain after this text."""
        ...

    def flush(self) -> list[ToolEvent]:
        """What was held back, when no more will come. A call that was cut off gets no ``CallEnds``."""
        ...


class CallFormatError(Exception):
    """The text is not a call of a tool that was offered."""
