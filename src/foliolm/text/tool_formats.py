"""How a model writes tool calls: which format a chat template teaches, and the grammar that holds an answer to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foliolm.text.grammar import WHITESPACE
from foliolm.text.tool_parsers import BEGIN, END, TOOL_PARSERS

MOST_CALLS = 16
"""Calls in one answer that a grammar allows; a small model would go on for ever."""

Function = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format, and its details in one model.

    Attributes:
        name: of its parser, in ``TOOL_PARSERS``.
        arguments_key: how the model names a call's arguments.
        special_tags: the tags are special tokens of the vocabulary, which a grammar names and not spells.
    """

    name: str
    arguments_key: str = "arguments"
    special_tags: bool = False

    def grammar(self, functions: Sequence[Function], *, several: bool, answer: Any = None) -> str:
        """A Lark grammar of an answer that calls tools, and does nothing else.

        Args:
            functions: OpenAI's function descriptions; arguments follow their ``parameters``.
            several: there may be more than one call.
            answer: a JSON schema: instead of calls, the answer may be a value of it; None: it must be calls.
        """
        calls = f'call ("\\n" call){{0,{MOST_CALLS - 1}}}' if several and self.name == "hermes" else "call"
        start = f"start: {calls}" if answer is None else f"start: {calls} | answer\nanswer: %json {_schema(answer)}"
        return "\n".join([start, self._call(), *self._bodies(functions)])

    def strict_grammar(self, functions: Sequence[Function]) -> str | None:
        """A Lark grammar of free text, and calls in it whose arguments are right; None where the format cannot tell
        a call from text before it ends."""
        if self.name != "hermes":
            return None
        begin = f"TEXT {BEGIN}" if self.special_tags else "head"
        lines = ["%llguidance {}", "start: found* TEXT", "TEXT: /(.|\\n)*/"]
        if not self.special_tags:
            lines.append(f"head[lazy]: TEXT {json.dumps(BEGIN)}")
        lines.append(f'found: {begin} "\\n" body "\\n" {self._tag(END)}')
        return "\n".join([*lines, *self._bodies(functions)])

    def _call(self) -> str:
        if self.name == "hermes":
            return f'call: {self._tag(BEGIN)} "\\n" body "\\n" {self._tag(END)}'
        return "call: body"

    def _tag(self, tag: str) -> str:
        return tag if self.special_tags else json.dumps(tag)

    def _bodies(self, functions: Sequence[Function]) -> list[str]:
        lines = ["body: " + " | ".join(f"body_{number}" for number in range(len(functions)))]
        for number, function in enumerate(functions):
            head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{self.arguments_key}": ')
            lines.append(f'body_{number}: {head} arguments_{number} "}}"')
            lines.append(f"arguments_{number}: %json {_schema(function.get('parameters') or {'type': 'object'})}")
        return lines


def tool_format(name: str, template_text: str, special_tokens: Sequence[str]) -> ToolFormat:
    """The format of a model.

    Args:
        name: of a parser, or ``auto``: what the template teaches.
        template_text: source of the chat template.
        special_tokens: spellings of the vocabulary's special tokens.
    """
    if name == "auto":
        name = "json" if "tools" in template_text and BEGIN not in template_text else "hermes"
    assert name in TOOL_PARSERS
    key = "parameters" if name == "json" and '"parameters": ' in template_text else "arguments"
    return ToolFormat(name, key, BEGIN in special_tokens and END in special_tokens)


def described_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation with tools as one without, for chat templates that know nothing of tools.

    Tools are described in the system message in the words that Hermes models were trained on, calls and results are
    written into assistants' and users' turns.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("tool_calls"):
            calls = [
                {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                for call in message["tool_calls"]
            ]
            written = [f"{BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{END}" for call in calls]
            turn["content"] = "\n".join([turn["content"], *written] if turn["content"] else written)
        elif message["role"] == "tool":
            turn = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
            if turns and turns[-1]["role"] == "user" and turns[-1]["content"].endswith("</tool_response>"):
                turns[-1]["content"] += "\n" + turn["content"]
                continue
        turns.append(turn)
    if tools:
        _describe(turns, tools)
    return turns


def _describe(turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"For each function call, return a json object with function name and arguments within {BEGIN}{END} XML tags:\n"
        f'{BEGIN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{END}'
    )
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] = f"{turns[0]['content']}\n\n{text}" if turns[0]["content"] else text
    else:
        turns.insert(0, {"role": "system", "content": text})


def _schema(schema: Any) -> str:
    """A schema for Lark's ``%json``, with the same bounds on whitespace as elsewhere."""
    guidance = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    return json.dumps({**schema, "x-guidance": guidance} if isinstance(schema, dict) else schema)
