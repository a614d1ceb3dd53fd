"""A conversation as clients send it: messages, tools and calls of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foliolm.core.errors import RequestError

MAX_TOOLS = 128
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """What a call calls; ``arguments`` is a JSON object, written as a string."""

    name: str = Field(pattern=TOOL_NAME)
    arguments: str


class ToolCall(_Strict):
    """A call that an assistant made."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(_Strict):
    """One turn of a conversation. ``name`` is given to the chat template, which may or may not write it.

    Answers of OpenAI's client can be sent back as they are: what their other fields hold where they are empty is
    allowed.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @property
    def text(self) -> str:
        """The content as one string: parts follow each other with nothing between them."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: arguments of calls are objects."""
        turn: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")},
                }
                for call in self.tool_calls
            ]
        return turn


class FunctionTool(_Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(_Strict):
    """The name of a function."""

    name: str


class NamedToolChoice(_Strict):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse turns that make no sense by themselves or after those before them.

    Raises:
        RequestError: names the field.
    """
    known_calls: set[str] = set()
    for number, message in enumerate(messages):
        _check_content(number, message)
        if message.tool_calls is not None:
            _check_calls(number, message)
            known_calls.update(call.id for call in message.tool_calls)
        if message.role == "tool":
            field = f"messages.{number}.tool_call_id"
            if message.tool_call_id is None:
                raise RequestError(f"{field} is absent; a tool's message must name the call that it answers", field)
            if message.tool_call_id not in known_calls:
                raise RequestError(
                    f"{field} is {message.tool_call_id[:80]!r}, which no assistant's turn before it calls", field
                )
        elif message.tool_call_id is not None:
            field = f"messages.{number}.tool_call_id"
            raise RequestError(f"{field} is given on a turn of role {message.role}; only a tool's has one", field)


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse too many tools, and two of one name.

    Raises:
        RequestError: names the field.
    """
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; the limit is {MAX_TOOLS}", "tools")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        field = f"tools.{number}.function.name"
        if tool.function.name in names:
            raise RequestError(f"{field} is {tool.function.name!r}, as is that of a tool before it", field)
        names.add(tool.function.name)


def _check_content(number: int, message: Message) -> None:
    field = f"messages.{number}.content"
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(
            f"{field} is null; it must be text (only an assistant's turn with tool_calls may have none)", field
        )
    if isinstance(message.content, list) and not message.content:
        raise RequestError(f"{field} is an empty list; it must hold at least one part", field)


def _check_calls(number: int, message: Message) -> None:
    field = f"messages.{number}.tool_calls"
    if message.role != "assistant":
        raise RequestError(f"{field} is given on a turn of role {message.role}; only an assistant calls tools", field)
    for place, call in enumerate(message.tool_calls or ()):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            inner = f"{field}.{place}.function.arguments"
            raise RequestError(f"{inner} is not a JSON object", inner)
