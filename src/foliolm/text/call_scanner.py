"""A call written as one JSON object, read as its characters come."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from foliolm.text.tool_events import CallArguments, CallBegins, CallEnds, CallFormatError, ToolEvent

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _At(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    AFTER_VALUE = enum.auto()
    DONE = enum.auto()


class CallScanner:
    """Reads ``{"name": …, "arguments": {…}}``, its keys in any order, other keys passed over.

    The name is given as soon as it is whole, then the arguments character by character, so that a client can show a
    long argument while it is written.

    Args:
        index: of the call.
        names: of the tools that may be called.

    Attributes:
        failed: it is no call; what was given of it stays without an end.
    """

    def __init__(self, index: int, names: Collection[str]) -> None:
        self._index = index
        self._names = names
        self._at = _At.START
        self._key: str | None = None
        self._value: list[str] = []  # of the value being read, or of the key
        self._depth = 0
        self._quoted = self._escaped = False
        self._name: str | None = None
        self._held: str | None = None  # arguments that came before the name
        self._has_arguments = False
        self.failed = False

    @property
    def begun(self) -> bool:
        """Whether the call has been announced."""
        return self._name is not None

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    def push(self, text: str) -> tuple[int, list[ToolEvent]]:
        """Read on, up to the end of the object, or to where it turns out to be no call of an offered tool (``failed``).

        Returns:
            Characters that were read, and what they mean.
        """
        events: list[ToolEvent] = []
        streamed: list[str] = []
        read = 0
        try:
            while read < len(text) and self._at is not _At.DONE:
                # A number or a word ends where something else begins, which then is taken again.
                if not self._step(text[read], streamed, events):
                    self._step(text[read], streamed, events)
                read += 1
            ending = self._completed() if self._at is _At.DONE else []
        except CallFormatError:
            self.failed, ending = True, []
        if streamed:
            events.append(CallArguments(self._index, "".join(streamed)))
        return read, events + ending

    def _completed(self) -> list[ToolEvent]:
        if self._name is None:
            raise CallFormatError("the call has no name")
        rest = [] if self._has_arguments else [CallArguments(self._index, "{}")]
        return [*rest, CallEnds(self._index)]

    def _step(self, character: str, streamed: list[str], events: list[ToolEvent]) -> bool:
        """Take a character; False: it ended a value and must be taken again."""
        at = self._at
        if at is _At.IN_VALUE:
            return self._in_value(character, streamed, events)
        if at is _At.KEY and self._quoted:
            self._in_key(character)
        elif character in _SPACE:
            pass
        elif at is _At.START and character == "{":
            self._at = _At.KEY
        elif at is _At.KEY and character == '"':
            self._quoted, self._value = True, ['"']
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at is _At.VALUE:
            self._begin_value(character, streamed)
        elif at is _At.AFTER_VALUE and character == ",":
            self._at = _At.KEY
        elif at in (_At.AFTER_VALUE, _At.KEY) and character == "}":
            self._at = _At.DONE
        else:
            raise CallFormatError(f"{character!r} is not expected there")
        return True

    def _in_key(self, character: str) -> None:
        self._value.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            self._key = str(_loaded("".join(self._value)))
            self._at = _At.COLON

    def _begin_value(self, character: str, streamed: list[str]) -> None:
        self._value, self._depth = [], 0
        self._at = _At.IN_VALUE
        if self._key in _ARGUMENT_KEYS and character not in '{"n':
            raise CallFormatError("the arguments are not an object")
        self._take(character, streamed)

    def _in_value(self, character: str, streamed: list[str], events: list[ToolEvent]) -> bool:
        word = self._value[0] not in '{["'
        if word and not self._quoted and (character in ",}" or character in _SPACE):
            self._end_value(events, streamed)
            return False
        self._take(character, streamed)
        if not word and not self._quoted and self._depth == 0:
            self._end_value(events, streamed)
        return True

    def _take(self, character: str, streamed: list[str]) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted and character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = not self._quoted
        elif not self._quoted:
            self._depth += (character in "{[") - (character in "}]")
        self._value.append(character)
        if self._is_streamed():
            streamed.append(character)

    def _is_streamed(self) -> bool:
        return self._key in _ARGUMENT_KEYS and self._name is not None and self._value[0] == "{"

    def _end_value(self, events: list[ToolEvent], streamed: list[str]) -> None:
        self._at = _At.AFTER_VALUE
        raw = "".join(self._value)
        if self._key == "name" and self._name is None:
            self._take_name(_loaded(raw), events)
        elif self._key in _ARGUMENT_KEYS:
            self._take_arguments(raw, streamed)

    def _take_name(self, name: object, events: list[ToolEvent]) -> None:
        if not isinstance(name, str) or name not in self._names:
            raise CallFormatError("no such tool was offered")
        self._name = name
        events.append(CallBegins(self._index, name))
        if self._held is not None:
            events.append(CallArguments(self._index, self._held))

    def _take_arguments(self, raw: str, streamed: list[str]) -> None:
        if self._has_arguments:
            raise CallFormatError("the arguments are given twice")
        self._has_arguments = True
        if raw[0] == "{":
            whole = raw if self._name is None else None  # else they were streamed
        elif raw[0] == '"':  # some models write the object as a string
            whole = str(_loaded(raw))
            if not isinstance(_loaded(whole), dict):
                raise CallFormatError("the arguments are not an object")
        elif raw == "null":
            whole = "{}"
        else:
            raise CallFormatError("the arguments are not an object")
        if whole is None:
            return
        if self._name is None:
            self._held = whole
        else:
            streamed.append(whole)


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        raise CallFormatError("it is not JSON") from None
