"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foliolm.api.choice import Choice, Delta
from foliolm.api.conversation import check_messages
from foliolm.api.errors import GenerationFailedError, error_body
from foliolm.api.generation import Generation
from foliolm.api.logprobs import chat_logprobs, prompt_logprobs
from foliolm.api.protocol import ChatBody
from foliolm.api.sampling import sampling_of
from foliolm.api.service import Answer, Service, usage_of
from foliolm.api.stream import DONE, JSONBytes, event, unless_disconnected
from foliolm.api.structured import checked_off_loop, grammar_of
from foliolm.api.tool_use import CallReader, ToolUse, tool_use
from foliolm.core.errors import RequestError
from foliolm.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class _Call:
    """What stays the same over a request."""

    service: Service
    body: ChatBody
    answer: Answer
    tools: ToolUse
    generation: Generation


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or streamed."""
    arrival_ns: int = request.scope["arrival_ns"]
    body = await service.read(request, ChatBody)
    answer = service.answer(request, body, "chatcmpl")
    check_messages(body.messages)
    tools = await _tools(service, body)
    sampling = sampling_of(body, service.model, tools.grammar, tools.stop)
    if tools.names and tools.format.special_tags:
        sampling = replace(sampling, skip_special_tokens=False)  # calls stand between special tokens
    prompt = await _prompt(service, body, tools)
    generation = await service.generate(body, answer, [prompt], sampling, "messages", arrival_ns)
    call = _Call(service, body, answer, tools, generation)
    headers = {"x-request-id": answer.id}
    if body.stream:
        return service.stream(generation, _events(call), headers)
    try:
        wholes = await unless_disconnected(request.receive, generation.results(), generation.abort)
        return JSONBytes(_whole(call, wholes, prompt), headers=headers)
    finally:
        service.release(generation)


async def _tools(service: Service, body: ChatBody) -> ToolUse:
    """The request's tools, and, with or without them, the grammar that its answer must follow."""
    wanted = grammar_of(body.response_format, body.structured_outputs)
    if body.tools and body.tool_choice != "none":
        tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, wanted, service.model.tool_format)
        for schema in tools.schemas:
            await checked_off_loop(schema)
    else:
        tools = tool_use(body.tools, body.tool_choice, None, None, service.model.tool_format).with_grammar(wanted)
    return tools if tools.grammar is None else tools.with_grammar(await checked_off_loop(tools.grammar))


async def _prompt(service: Service, body: ChatBody, tools: ToolUse) -> list[int]:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template = service.model.chat_template
        if template is None or "reasoning_effort" not in template.variables:
            raise RequestError("reasoning_effort is given, but the model has no such setting", "reasoning_effort")
        variables["reasoning_effort"] = body.reasoning_effort
    continued = bool(body.continue_final_message)
    return await service.model.encode_chat_off_loop(
        [message.for_template() for message in body.messages],
        tools.described,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        variables=variables,
    )


def _whole(call: _Call, wholes: Any, prompt: list[int]) -> dict[str, Any]:
    """The whole answer."""
    choices = []
    for choice, whole in zip(call.generation.choices, wholes, strict=True):
        reader = call.tools.reader()
        content, _ = reader.push(whole.text, at_end=True)
        message: dict[str, Any] = {"role": "assistant", "content": content or None if reader.calls else content}
        message["refusal"] = None
        if reader.calls:
            message["tool_calls"] = reader.calls
        part = {
            "index": choice.index,
            "message": message,
            "logprobs": _logprobs(call, whole),
            "finish_reason": _reason(call, whole, reader),
            "stop_reason": _stop_reason(call, whole),
        }
        if call.body.return_token_ids:
            part["token_ids"] = whole.token_ids
        if call.body.timings:
            part["timings"] = call.generation.timings(choice)
        choices.append(part)
    answer = {**call.answer.frame("chat.completion"), "choices": choices, "usage": usage_of(call.generation)}
    if call.body.prompt_logprobs is not None:
        entries = call.generation.choices[0].prompt_logprobs
        answer["prompt_logprobs"] = prompt_logprobs(call.service.model.tokenizer, entries, call.body.prompt_logprobs)
    if call.body.return_token_ids:
        answer["prompt_token_ids"] = prompt
    return answer


async def _events(call: _Call) -> AsyncGenerator[bytes, None]:
    generation, options = call.generation, call.body.stream_options
    frame = call.answer.frame("chat.completion.chunk")
    with_usage = bool(options and options.include_usage)
    running_usage = bool(options and options.continuous_usage_stats)
    if with_usage:
        frame["usage"] = None
    readers = {choice.index: call.tools.reader() for choice in generation.choices}
    for choice in generation.choices:
        first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        yield event({**frame, "choices": [{**first, "finish_reason": None}]})
    async for choice, delta in generation.deltas():
        if delta.finish_reason is FinishReason.ERROR:
            yield event(error_body(choice.dead or GenerationFailedError(delta.error)))
            return
        part = _part(call, choice, delta, readers[choice.index])
        if part is not None:
            chunk = {**frame, "choices": [part]}
            yield event({**chunk, "usage": usage_of(generation)} if running_usage else chunk)
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage_of(generation)})
    yield DONE


def _part(call: _Call, choice: Choice, delta: Delta, reader: CallReader) -> dict[str, Any] | None:
    """A chunk's choice; None where its tokens make nothing yet that is worth a chunk."""
    ended = delta.finish_reason is not None
    content, calls = reader.push(delta.text, at_end=ended)
    if not (content or calls or delta.logprobs or ended or (call.body.return_token_ids and delta.token_ids)):
        return None
    new: dict[str, Any] = {}
    if content or (delta.logprobs and not calls):
        new["content"] = content
    if calls:
        new["tool_calls"] = calls
    part = {"index": choice.index, "delta": new, "logprobs": _logprobs(call, delta), "finish_reason": None}
    if ended:
        part["finish_reason"] = _reason(call, delta, reader)
        part["stop_reason"] = _stop_reason(call, delta)
        if call.body.timings:
            part["timings"] = call.generation.timings(choice)
    if call.body.return_token_ids:
        part["token_ids"] = delta.token_ids
    return part


def _reason(call: _Call, delta: Delta, reader: CallReader) -> str | None:
    """``tool_calls`` where the answer ended by itself and its calls are complete."""
    if delta.finish_reason is FinishReason.STOP and reader.called:
        return "tool_calls"
    return delta.finish_reason


def _stop_reason(call: _Call, delta: Delta) -> str | int | None:
    # A stop string that the client did not ask for is nothing to tell it of.
    return None if call.tools.stop and delta.stop_reason == call.tools.stop else delta.stop_reason


def _logprobs(call: _Call, delta: Delta) -> dict[str, Any] | None:
    if not call.body.logprobs:
        return None
    return chat_logprobs(call.service.model.tokenizer, delta.logprobs, call.body.top_logprobs or 0)
