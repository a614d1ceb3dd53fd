"""From a request's body to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from foliolm.api.protocol import ChatBody, CompletionBody, GenerationBody
from foliolm.api.served_model import ServedModel
from foliolm.core.errors import RequestError
from foliolm.core.grammar import GrammarSpec
from foliolm.core.sampling import BEAM_REFUSES, MAX_STOP_STRINGS, BeamSearch, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions endpoint generates when ``max_tokens`` is absent; chat goes on to the context's end."""

MAX_METADATA = 16

# Body fields that have the same name and meaning in SamplingParams.
_SAME = frozenset(f.name for f in fields(SamplingParams)) & frozenset(GenerationBody.model_fields) - {
    "max_tokens",
    "stop",
    "logit_bias",
}


def sampling_of(
    body: ChatBody | CompletionBody, model: ServedModel, grammar: GrammarSpec | None = None, stop: str = ""
) -> SamplingParams:
    """Sampling parameters of a body; what it leaves out comes from the model's defaults. ``max_tokens`` is as asked.

    Args:
        body: the request's.
        model: its defaults and limits.
        grammar: what the answer must follow.
        stop: one more stop string; "": none.

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
    values["grammar"] = grammar
    if body.use_beam_search:
        for name in BEAM_REFUSES:
            if getattr(body, name, None) is None:
                values.pop(name, None)  # the model's defaults are about sampling
        values["beam"] = _beam(body)
    if isinstance(body, ChatBody):
        values["logprobs"] = _chat_logprobs(body)
        _set_max_tokens(values, body)
    else:
        if not body.use_beam_search:
            _check_best_of(body)
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if scores_only(body):
            values["max_tokens"] = 1  # something has to be sampled for a prompt to be computed; it is left out
        values["logprobs"] = body.logprobs
        if body.echo and body.logprobs is not None:
            values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    sampling = SamplingParams(**values)
    model.check_sampling(sampling)
    if stop:  # after the check: it does not count among the client's
        return replace(sampling, stop=(*sampling.stop[: MAX_STOP_STRINGS - 1], stop))
    return sampling


def scores_only(body: CompletionBody) -> bool:
    """Whether a body asks for nothing but its own prompt, with logprobs: ``echo`` with ``max_tokens`` 0."""
    return bool(body.echo) and body.max_tokens == 0


def check_options(body: GenerationBody) -> None:
    """Refuse options that contradict each other.

    Raises:
        RequestError: names the field.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, but stream is not true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is given with stream; it comes with whole answers only", "prompt_logprobs")
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise RequestError(f"{name} is given, but use_beam_search is not true", name)
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata has {len(metadata)} entries; the limit is {MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError(
                f"metadata holds a key of {len(key)} and a value of {len(value)} characters; the limits are 64 and 512",
                "metadata",
            )


def _set_max_tokens(values: dict[str, Any], body: ChatBody) -> None:
    # The newer name wins; an error must name the one that the client wrote.
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(body, field)
    if asked is not None:
        if asked < 1:
            raise RequestError(f"{field} is {asked}; it must be at least 1", field)
        values["max_tokens"] = asked


def _chat_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise RequestError("top_logprobs is given, but logprobs is not true", "top_logprobs")
        return None
    return body.top_logprobs or 0


def _beam(body: ChatBody | CompletionBody) -> BeamSearch:
    """As many hypotheses as ``best_of`` says, else ``n``."""
    n = 1 if body.n is None else body.n
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    if best_of is not None and best_of < n:
        raise RequestError(f"best_of is {best_of} and n is {n}; it must be at least n", "best_of")
    return BeamSearch(
        width=n if best_of is None else best_of,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
    )


def _check_best_of(body: CompletionBody) -> None:
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise RequestError(f"best_of is {body.best_of} and n is {n}; only best_of equal to n is served", "best_of")


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key[:40]!r}; keys must be token ids", "logit_bias")
    return int(key)
