"""From a request's body to sampling parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from foliolm.api.protocol import ChatBody, CompletionBody, GenerationBody
from foliolm.api.served_model import ServedModel
from foliolm.core.errors import RequestError
from foliolm.core.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions endpoint generates when ``max_tokens`` is absent; chat goes on to the context's end."""

# Body fields that have the same name and meaning in SamplingParams.
_SAME = frozenset(f.name for f in fields(SamplingParams)) & frozenset(GenerationBody.model_fields) - {
    "max_tokens",
    "stop",
    "logit_bias",
}


def sampling_of(body: ChatBody | CompletionBody, model: ServedModel) -> SamplingParams:
    """Sampling parameters of a body; what it leaves out comes from the model's defaults. ``max_tokens`` is as asked.

    Raises:
        RequestError: a value is out of range; names the field, the value and the limit.
    """
    values: dict[str, Any] = dict(model.sampling_defaults)
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        values["logit_bias"] = tuple((_token_id(key), bias) for key, bias in body.logit_bias.items())
    if body.bad_words is not None:
        values["bad_words_token_ids"] = model.bad_words(body.bad_words)
    if isinstance(body, ChatBody):
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if asked is not None:
            values["max_tokens"] = asked
        values["logprobs"] = _chat_logprobs(body)
    else:
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        values["logprobs"] = body.logprobs
        _check_best_of(body)
    sampling = SamplingParams(**values)
    model.check_sampling(sampling)
    return sampling


def check_options(body: GenerationBody) -> None:
    """Refuse options that contradict each other.

    Raises:
        RequestError: names the field.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, but stream is not true", "stream_options")


def _chat_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise RequestError("top_logprobs is given, but logprobs is not true", "top_logprobs")
        return None
    return body.top_logprobs or 0


def _check_best_of(body: CompletionBody) -> None:
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise RequestError(f"best_of is {body.best_of} and n is {n}; only best_of equal to n is served", "best_of")


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key[:40]!r}; keys must be token ids", "logit_bias")
    return int(key)
