"""The bodies that clients send, as pydantic models: unknown fields are refused by name, and null means absent."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foliolm.api.conversation import Message, NamedToolChoice, Tool
from foliolm.api.refused import check_extra_fields
from foliolm.api.structured import ResponseFormat, StructuredOutputs
from foliolm.core.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)

_SHOWN_ERRORS = 3
_LABEL = r"^[\x21-\x7e]+$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """Options that only make sense with ``stream``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(BaseModel):
    """What chat and plain completions have in common. See ``SamplingParams`` for what each number means.

    ``user``, ``safety_identifier`` and ``metadata`` go into the request's log line and do nothing else.
    ``ttft_target_ms`` refuses the request if its first token is predicted to take longer; ``degrade`` takes fewer
    choices or tokens instead of a refusal, and the answer says so. ``timings`` adds where a choice's time went, by
    part, to the choice (streamed: to its last chunk).
    ``prompt_cache_key`` asks that requests of one key share a cache; here all do.
    """

    # Unknown fields are kept, so that ``refused`` can say why.
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    request_id: str | None = Field(default=None, max_length=256, pattern=_LABEL)
    timeout: float | None = Field(default=None, gt=0, le=86_400)
    user: str | None = Field(default=None, max_length=256)
    safety_identifier: str | None = Field(default=None, max_length=256)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    metadata: dict[str, str] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    ttft_target_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    degrade: bool | None = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(_Strict):
    """``POST /tokenize``: either a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """The body as a model.

    Raises:
        RequestError: it is no JSON object, lacks a field, has an unknown one, or one of a wrong type. Names the first
            few fields at fault; never repeats what the client sent, which may be long.
    """
    try:
        body = kind.model_validate_json(raw)
        check_extra_fields(body.model_extra)
        return body
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    first = problems[0]
    if first["type"] == "json_invalid":
        raise RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:
        name = _path(unknown[0])
        raise RequestError(f"unknown or unsupported field {name[:200]!r}", name, "unknown_field")
    # A field that may have several types reports a problem for each; they share the path up to the type's name.
    shown: dict[str, str] = {}
    for problem in problems:
        shown.setdefault(_path(problem), problem["msg"])
    lines = [f"{name}: {text}" if name else text for name, text in list(shown.items())[:_SHOWN_ERRORS]]
    more = f" (and {len(shown) - _SHOWN_ERRORS} more)" if len(shown) > _SHOWN_ERRORS else ""
    raise RequestError("; ".join(lines) + more, _path(first) or None)


def _path(problem: Any) -> str:
    # "messages.0.content" for a person; parts that pydantic adds for a union's member are no part of the body.
    parts = [
        part
        for part in problem["loc"]
        if isinstance(part, int) or (str(part).isidentifier() and part not in (NamedToolChoice.__name__, "constrained"))
    ]
    while len(parts) > 1 and parts[-1] in ("str", "int", "float", "bool"):
        parts.pop()
    return ".".join(str(part) for part in parts)
