"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foliolm.api.choice import Choice, Delta
from foliolm.api.echo import EchoedPrompt
from foliolm.api.errors import GenerationFailedError, error_body
from foliolm.api.generation import Generation
from foliolm.api.logprobs import CompletionLogprobs, joined, prompt_logprobs
from foliolm.api.protocol import CompletionBody
from foliolm.api.sampling import sampling_of, scores_only
from foliolm.api.service import Answer, Service, usage_of
from foliolm.api.stream import DONE, JSONBytes, event, unless_disconnected
from foliolm.api.structured import checked_off_loop, grammar_of
from foliolm.core.errors import RequestError
from foliolm.core.request import FinishReason

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class _Call:
    """What stays the same over a request; ``echoed`` and ``logprobs`` by choice."""

    service: Service
    body: CompletionBody
    answer: Answer
    generation: Generation
    echoed: dict[int, EchoedPrompt]
    logprobs: dict[int, CompletionLogprobs]

    @property
    def scores_only(self) -> bool:
        """Whether what was generated is left out."""
        return scores_only(self.body)


async def completions(service: Service, request: Request) -> Response:
    """Continue one prompt or several, whole or streamed. Prompts are texts or lists of token ids."""
    arrival_ns: int = request.scope["arrival_ns"]
    body = await service.read(request, CompletionBody)
    answer = service.answer(request, body, "cmpl")
    grammar = grammar_of(body.response_format, body.structured_outputs)
    sampling = sampling_of(body, service.model, None if grammar is None else await checked_off_loop(grammar))
    prompts = _prompts(body)
    token_ids = [await _token_ids(service, prompt, body.add_special_tokens is not False) for prompt in prompts]
    generation = await service.generate(body, answer, token_ids, sampling, "prompt", arrival_ns)
    call = _prepared(service, body, answer, generation, prompts, len(generation.choices) // len(prompts))
    headers = {"x-request-id": answer.id}
    if body.stream:
        return service.stream(generation, _events(call), headers)
    try:
        wholes = await unless_disconnected(request.receive, generation.results(), generation.abort)
        choices = [_part(call, choice, whole) for choice, whole in zip(generation.choices, wholes, strict=True)]
        usage = usage_of(generation, not call.scores_only)
        return JSONBytes({**answer.frame("text_completion"), "choices": choices, "usage": usage}, headers=headers)
    finally:
        service.release(generation)


def _prepared(
    service: Service,
    body: CompletionBody,
    answer: Answer,
    generation: Generation,
    prompts: Sequence[Prompt],
    n: int,
) -> _Call:
    tokenizer = service.model.tokenizer
    echoed = {}
    if body.echo:
        for choice in generation.choices:
            echoed[choice.index] = EchoedPrompt(tokenizer, prompts[choice.index // n], choice.prompt_token_ids)
    logprobs = {}
    if body.logprobs is not None:
        skipped = frozenset[int]() if body.skip_special_tokens is False else tokenizer.special_ids
        logprobs = {
            choice.index: CompletionLogprobs(tokenizer, body.logprobs, skipped) for choice in generation.choices
        }
    return _Call(service, body, answer, generation, echoed, logprobs)


async def _events(call: _Call) -> AsyncGenerator[bytes, None]:
    generation, options = call.generation, call.body.stream_options
    frame = call.answer.frame("text_completion")
    with_usage = bool(options and options.include_usage)
    running_usage = bool(options and options.continuous_usage_stats)
    if with_usage:
        frame["usage"] = None
    begun: set[int] = set()
    async for choice, delta in generation.deltas():
        if delta.finish_reason is FinishReason.ERROR:
            yield event(error_body(choice.dead or GenerationFailedError(delta.error)))
            return
        first = choice.index not in begun
        # The prompt's logprobs are all there once there is a token.
        if first and not delta.token_ids and delta.finish_reason is None:
            continue
        begun.add(choice.index)
        says = delta.text or delta.logprobs or delta.finish_reason is not None or (first and call.echoed)
        if says or call.body.return_token_ids:
            part = _part(call, choice, delta, first)
            chunk = {**frame, "choices": [part]}
            yield event({**chunk, "usage": usage_of(generation, not call.scores_only)} if running_usage else chunk)
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage_of(generation, not call.scores_only)})
    yield DONE


def _prompts(body: CompletionBody) -> Sequence[Prompt]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise RequestError("prompt is an empty list; it must hold at least one prompt or token id", "prompt")
    if isinstance(body.prompt[0], int):
        return [body.prompt]
    return body.prompt


async def _token_ids(service: Service, prompt: Prompt, add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return await service.model.encode_off_loop(prompt, "prompt", add_special_tokens)


def _part(call: _Call, choice: Choice, delta: Delta, first: bool = True) -> dict[str, Any]:
    """A choice, or a chunk of one; ``first`` has the prompt where it is echoed."""
    if call.scores_only:
        ended = delta.finish_reason is not None
        reason = FinishReason.LENGTH if ended and delta.finish_reason is not FinishReason.ABORT else delta.finish_reason
        delta = replace(delta, text="", token_ids=[], logprobs=[], finish_reason=reason, stop_reason=None)
    counter = call.logprobs.get(choice.index)
    echo = call.echoed.get(choice.index) if first else None
    text = delta.text if echo is None else echo.text(continued=not call.scores_only) + delta.text
    prompt = None
    if counter is not None and echo is not None:
        prompt = counter.of_prompt(echo.spelt, choice.prompt_logprobs)
    new = counter.of(delta.logprobs) if counter is not None else None
    part = {
        "index": choice.index,
        "text": text,
        "logprobs": joined(prompt, new) if prompt is not None and new is not None else new,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    if call.body.prompt_logprobs is not None:
        tokenizer = call.service.model.tokenizer
        part["prompt_logprobs"] = prompt_logprobs(tokenizer, choice.prompt_logprobs, call.body.prompt_logprobs)
    if call.body.return_token_ids:
        part["token_ids"] = delta.token_ids
        part["prompt_token_ids"] = list(choice.prompt_token_ids) if first else None
    if call.body.timings and delta.finish_reason is not None:
        part["timings"] = call.generation.timings(choice)
    return part
