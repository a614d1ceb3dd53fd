"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foliolm.api.choice import Choice, Delta
from foliolm.api.errors import GenerationFailedError, error_body
from foliolm.api.generation import Generation
from foliolm.api.logprobs import CompletionLogprobs
from foliolm.api.protocol import CompletionBody
from foliolm.api.sampling import sampling_of
from foliolm.api.service import Answer, Service, usage_of
from foliolm.api.stream import DONE, JSONBytes, event, unless_disconnected
from foliolm.core.errors import RequestError
from foliolm.core.request import FinishReason


async def completions(service: Service, request: Request) -> Response:
    """Continue one prompt or several, whole or streamed. Prompts are texts or lists of token ids."""
    arrival_ns: int = request.scope["arrival_ns"]
    body = await service.read(request, CompletionBody)
    answer = service.answer(request, body, "cmpl")
    sampling = sampling_of(body, service.model)
    prompts = [await _token_ids(service, prompt) for prompt in _prompts(body)]
    generation = await service.generate(body, answer, prompts, sampling, "prompt", arrival_ns)
    logprobs = _counters(service, generation, body)
    headers = {"x-request-id": answer.id}
    if body.stream:
        events = _events(service, generation, body, answer, logprobs)
        return service.stream(generation, events, headers)
    try:
        wholes = await unless_disconnected(request.receive, generation.results(), generation.abort)
        choices = [_part(choice, whole, logprobs) for choice, whole in zip(generation.choices, wholes, strict=True)]
        frame = _frame(answer)
        return JSONBytes({**frame, "choices": choices, "usage": usage_of(generation)}, headers=headers)
    finally:
        service.release(generation)


async def _events(
    service: Service,
    generation: Generation,
    body: CompletionBody,
    answer: Answer,
    logprobs: dict[int, CompletionLogprobs],
) -> AsyncGenerator[bytes, None]:
    frame = _frame(answer)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    if with_usage:
        frame["usage"] = None
    async for choice, delta in generation.deltas():
        if delta.finish_reason is FinishReason.ERROR:
            yield event(error_body(choice.dead or GenerationFailedError(delta.error)))
            return
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            yield event({**frame, "choices": [_part(choice, delta, logprobs)]})
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage_of(generation)})
    yield DONE


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise RequestError("prompt is an empty list; it must hold at least one prompt or token id", "prompt")
    if isinstance(body.prompt[0], int):
        return [body.prompt]
    return body.prompt


async def _token_ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return await service.model.encode_off_loop(prompt, "prompt")


def _counters(service: Service, generation: Generation, body: CompletionBody) -> dict[int, CompletionLogprobs]:
    if body.logprobs is None:
        return {}
    return {choice.index: CompletionLogprobs(service.model.tokenizer, body.logprobs) for choice in generation.choices}


def _frame(answer: Answer) -> dict[str, Any]:
    return {"id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model}


def _part(choice: Choice, delta: Delta, logprobs: dict[int, CompletionLogprobs]) -> dict[str, Any]:
    counter = logprobs.get(choice.index)
    return {
        "index": choice.index,
        "text": delta.text,
        "logprobs": counter.of(delta.logprobs) if counter else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
