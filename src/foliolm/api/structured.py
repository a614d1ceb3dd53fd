"""Structured output: what a body asks of the answer's form, as a grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foliolm.core.errors import RequestError
from foliolm.core.grammar import GrammarSpec
from foliolm.text.grammar import checked_grammar

MAX_CHOICES = 10_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchemaFormat(_Strict):
    """A named JSON schema. It is followed whether or not ``strict`` asks for that."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of the answer: plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Strict):
    """The form of the answer, in more ways; exactly one of the first five is given.

    ``grammar`` is Lark or GBNF. The last two are for JSON: a regular expression for the whitespace between its parts,
    or none at all.
    """

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = Field(default=None, min_length=1, max_length=200)
    disable_any_whitespace: bool | None = None


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> GrammarSpec | None:
    """The grammar that the two fields ask for, or None.

    Raises:
        RequestError: they contradict each other or themselves.
    """
    wanted = None if response_format is None else _of_response_format(response_format)
    if structured is None:
        return wanted
    if wanted is not None:
        raise RequestError("response_format and structured_outputs are both given; give one", "structured_outputs")
    return _of_structured(structured)


async def checked_off_loop(spec: GrammarSpec) -> GrammarSpec:
    """A grammar that was looked at in a thread, and is right by itself.

    Raises:
        RequestError: names the field and what is wrong.
    """
    return await asyncio.to_thread(checked_grammar, spec)


def _of_response_format(wanted: ResponseFormat) -> GrammarSpec | None:
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        raise RequestError(
            f"response_format.json_schema is given, but response_format.type is {wanted.type}",
            "response_format.json_schema",
        )
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec("json", '{"type": "object"}', "response_format")
    if wanted.json_schema is None:
        raise RequestError("response_format.json_schema is absent", "response_format.json_schema")
    schema = {"type": "object"} if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
    return GrammarSpec("json", json.dumps(schema), "response_format.json_schema.schema")


def _of_structured(wanted: StructuredOutputs) -> GrammarSpec:
    given = [name for name in ("regex", "choice", "grammar") if getattr(wanted, name) is not None]
    given += ["json"] if wanted.json_ is not None else []
    given += ["json_object"] if wanted.json_object else []
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs holds {' and '.join(given) or 'no form'}; "
            "it must hold exactly one of json, regex, choice, grammar and json_object",
            "structured_outputs",
        )
    (kind,) = given
    field = f"structured_outputs.{kind}"
    if kind not in ("json", "json_object"):
        _refuse_whitespace(wanted, kind)
    if kind == "regex":
        return GrammarSpec("regex", wanted.regex or "", field)
    if kind == "grammar":
        return GrammarSpec("grammar", wanted.grammar or "", field)
    if kind == "choice":
        return _of_choice(wanted.choice or [], field)
    source = '{"type": "object"}' if wanted.json_ is None else wanted.json_
    return GrammarSpec("json", source if isinstance(source, str) else json.dumps(source), field, _whitespace(wanted))


def _of_choice(choices: list[str], field: str) -> GrammarSpec:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(f"{field} has {len(choices)} entries; it must have from 1 to {MAX_CHOICES}", field)
    return GrammarSpec("choice", json.dumps(choices), field)


def _whitespace(wanted: StructuredOutputs) -> str | None:
    if not wanted.disable_any_whitespace:
        return wanted.whitespace_pattern
    if wanted.whitespace_pattern is not None:
        field = "structured_outputs.whitespace_pattern"
        raise RequestError(f"{field} is given, but disable_any_whitespace is true", field)
    return ""


def _refuse_whitespace(wanted: StructuredOutputs, kind: str) -> None:
    for name in ("whitespace_pattern", "disable_any_whitespace"):
        if getattr(wanted, name):
            field = f"structured_outputs.{name}"
            raise RequestError(f"{field} is given, but it says nothing about {kind}", field)
