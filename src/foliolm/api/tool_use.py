"""Tools of one request: what the template is told, what the answer must follow, and how calls are read out of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foliolm.api.conversation import NamedToolChoice, Tool, check_tools
from foliolm.core.errors import RequestError
from foliolm.core.grammar import GrammarSpec
from foliolm.text.tool_events import CallArguments, CallBegins, CallEnds, TextPart, ToolEvent, ToolParser
from foliolm.text.tool_formats import ToolFormat
from foliolm.text.tool_parsers import END, TOOL_PARSERS


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request.

    Attributes:
        described: tools that the template is told of, in OpenAI's form.
        names: of the tools that may be called; none: answers are text.
        format: how the model writes calls.
        grammar: what the answer must follow for the tools' sake, or None.
        stop: a string that ends the answer after its first call, where there may be only one; "": none.
        most: calls of an answer that are passed on.
        schemas: the parameters of each tool that the grammar holds calls to, to be looked at one by one.
    """

    described: tuple[dict[str, Any], ...]
    names: frozenset[str]
    format: ToolFormat
    grammar: GrammarSpec | None = None
    stop: str = ""
    most: int | None = None
    schemas: tuple[GrammarSpec, ...] = ()

    def with_grammar(self, grammar: GrammarSpec | None) -> ToolUse:
        """The same, with another grammar."""
        return replace(self, grammar=grammar)

    def reader(self) -> CallReader:
        """A fresh reader for one answer."""
        return CallReader(TOOL_PARSERS[self.format.name](self.names) if self.names else None, self.most)


def tool_use(
    tools: Sequence[Tool] | None,
    choice: str | NamedToolChoice | None,
    parallel: bool | None,
    wanted: GrammarSpec | None,
    format: ToolFormat,
) -> ToolUse:
    """What a request's tools come to.

    With ``none`` the template is told of no tools, and whatever the answer looks like, it is text. With ``required`` or
    a name, a grammar holds the answer to calls with right arguments. With ``auto`` the answer is free, except for
    arguments of tools with ``strict``.

    Args:
        tools, choice, parallel: the body's ``tools``, ``tool_choice`` and ``parallel_tool_calls``.
        wanted: the grammar that the body asks for otherwise.
        format: of the model.

    Raises:
        RequestError: they contradict each other.
    """
    check_tools(tools or ())
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a call, but tools is absent or empty", "tool_choice")
        return ToolUse((), frozenset(), format)
    if choice == "none":
        return ToolUse((), frozenset(), format)
    described = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    offered = [tool.function for tool in tools]
    if isinstance(choice, NamedToolChoice):
        offered = [function for function in offered if function.name == choice.function.name]
        if not offered:
            raise RequestError(
                f"tool_choice names {choice.function.name[:80]!r}, which is not among the tools", "tool_choice"
            )
    functions = [function.model_dump(exclude_none=True) for function in offered]
    forced = choice == "required" or isinstance(choice, NamedToolChoice)
    several = parallel is not False and not isinstance(choice, NamedToolChoice)
    grammar = None
    if forced:
        if wanted is not None:
            raise RequestError(
                f"{wanted.field} gives text a form, but tool_choice leaves no room for text", "tool_choice"
            )
        grammar = format.grammar(functions, several=several)
    elif wanted is not None:
        grammar = format.grammar(functions, several=several, answer=_answer(wanted))
    elif any(function.strict for function in offered):
        grammar = _strict(format, functions)
    schemas = () if grammar is None else _schemas(tools, {function["name"] for function in functions})
    return ToolUse(
        described,
        frozenset(function["name"] for function in functions),
        format,
        None if grammar is None else GrammarSpec("grammar", grammar, "tools"),
        END if not several and not forced and format.name == "hermes" else "",
        None if several else 1,
        schemas,
    )


def _answer(wanted: GrammarSpec) -> Any:
    if wanted.kind != "json" or wanted.whitespace is not None:
        raise RequestError(
            f"{wanted.field} and tools are both given; beside tools, only a JSON form of the answer is served",
            wanted.field,
        )
    return json.loads(wanted.source)


def _strict(format: ToolFormat, functions: Sequence[dict[str, Any]]) -> str:
    loose = [f if f.get("strict") else {**f, "parameters": {"type": "object"}} for f in functions]
    grammar = format.strict_grammar(loose)
    if grammar is None:
        raise RequestError(
            "a tool asks for strict arguments; the model writes calls as plain JSON, where they can be promised with "
            "tool_choice required or a name only",
            "tools",
        )
    return grammar


def _schemas(tools: Sequence[Tool], names: set[str]) -> tuple[GrammarSpec, ...]:
    return tuple(
        GrammarSpec("json", json.dumps(tool.function.parameters), f"tools.{number}.function.parameters")
        for number, tool in enumerate(tools)
        if tool.function.parameters is not None and tool.function.name in names
    )


class CallReader:
    """Reads one answer's text, and gives what OpenAI's answers have instead: content and calls.

    Args:
        parser: None: all of it is content.
        most: calls beyond this many are left out; None: none is.
    """

    def __init__(self, parser: ToolParser | None, most: int | None = None) -> None:
        self._parser = parser
        self._most = most
        self._complete = 0
        self._calls: list[dict[str, Any]] = []

    @property
    def called(self) -> bool:
        """Whether there are calls, and all of them are complete."""
        return bool(self._calls) and self._complete == len(self._calls)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls so far, whole."""
        return self._calls

    def push(self, text: str, at_end: bool) -> tuple[str, list[dict[str, Any]]]:
        """New content, and new parts of calls as a stream's chunks have them.

        Args:
            text: what came.
            at_end: nothing more will.
        """
        if self._parser is None:
            return text, []
        events = self._parser.push(text) if text else []
        if at_end:
            events = [*events, *self._parser.flush()]
        content = "".join(event.text for event in events if isinstance(event, TextPart))
        return content, [part for event in events if (part := self._part(event)) is not None]

    def _part(self, event: ToolEvent) -> dict[str, Any] | None:
        if isinstance(event, TextPart) or (self._most is not None and event.index >= self._most):
            return None
        if isinstance(event, CallBegins):
            identifier = f"call_{secrets.token_hex(12)}"
            function = {"name": event.name, "arguments": ""}
            self._calls.append({"id": identifier, "type": "function", "function": dict(function)})
            return {"index": event.index, "id": identifier, "type": "function", "function": function}
        if isinstance(event, CallArguments):
            self._calls[event.index]["function"]["arguments"] += event.text
            return {"index": event.index, "function": {"arguments": event.text}}
        self._complete += isinstance(event, CallEnds)
        return None
