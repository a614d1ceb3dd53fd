"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foliolm.api.choice import Choice, Delta
from foliolm.api.errors import GenerationFailedError, error_body
from foliolm.api.generation import Generation
from foliolm.api.logprobs import chat_logprobs
from foliolm.api.protocol import ChatBody
from foliolm.api.sampling import sampling_of
from foliolm.api.service import Answer, Service, usage_of
from foliolm.api.stream import DONE, JSONBytes, event, unless_disconnected
from foliolm.core.request import FinishReason


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    arrival_ns: int = request.scope["arrival_ns"]
    body = await service.read(request, ChatBody)
    answer = service.answer(request, body, "chatcmpl")
    sampling = sampling_of(body, service.model)
    continued = bool(body.continue_final_message)
    prompt = await service.model.encode_chat_off_loop(
        [_message(m.role, m.text, m.name) for m in body.messages],
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        variables=body.chat_template_kwargs,
    )
    generation = await service.generate(body, answer, [prompt], sampling, "messages", arrival_ns)
    headers = {"x-request-id": answer.id}
    if body.stream:
        events = _events(service, generation, body, answer)
        return service.stream(generation, events, headers)
    try:
        wholes = await unless_disconnected(request.receive, generation.results(), generation.abort)
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": whole.text, "refusal": None},
                "logprobs": _logprobs(service, body, whole),
                "finish_reason": whole.finish_reason,
                "stop_reason": whole.stop_reason,
            }
            for choice, whole in zip(generation.choices, wholes, strict=True)
        ]
        frame = _frame(answer, "chat.completion")
        return JSONBytes({**frame, "choices": choices, "usage": usage_of(generation)}, headers=headers)
    finally:
        service.release(generation)


async def _events(
    service: Service, generation: Generation, body: ChatBody, answer: Answer
) -> AsyncGenerator[bytes, None]:
    frame = _frame(answer, "chat.completion.chunk")
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    if with_usage:
        frame["usage"] = None
    for choice in generation.choices:
        yield event({**frame, "choices": [_part(choice, {"role": "assistant", "content": ""}, None, None)]})
    async for choice, delta in generation.deltas():
        if delta.finish_reason is FinishReason.ERROR:
            yield event(error_body(choice.dead or GenerationFailedError(delta.error)))
            return
        # A delta without text or logprobs holds tokens that make no whole character yet: not worth a chunk.
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            content = {"content": delta.text} if delta.text or delta.logprobs else {}
            part = _part(choice, content, _logprobs(service, body, delta), delta)
            yield event({**frame, "choices": [part]})
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage_of(generation)})
    yield DONE


def _message(role: str, text: str, name: str | None) -> dict[str, str]:
    message = {"role": role, "content": text}
    if name is not None:
        message["name"] = name
    return message


def _frame(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _part(choice: Choice, content: dict[str, Any], logprobs: Any, delta: Delta | None) -> dict[str, Any]:
    reason = delta.finish_reason if delta else None
    part = {"index": choice.index, "delta": content, "logprobs": logprobs, "finish_reason": reason}
    if reason is not None and delta is not None:
        part["stop_reason"] = delta.stop_reason
    return part


def _logprobs(service: Service, body: ChatBody, delta: Delta) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return chat_logprobs(service.model.tokenizer, delta.logprobs, body.top_logprobs or 0)
