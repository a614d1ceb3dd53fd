"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from foliolm.api.conversation import check_messages, check_tools
from foliolm.api.protocol import DetokenizeBody, TokenizeBody
from foliolm.api.service import Service
from foliolm.core.errors import RequestError

MAX_TOKENS = 1 << 20


async def tokenize(service: Service, request: Request) -> dict[str, Any]:
    """Token ids of a text, as ``/v1/completions`` reads it, or of a conversation, as ``/v1/chat/completions`` does."""
    body = await service.read(request, TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    ids = await (_of_text(service, body) if body.messages is None else _of_messages(service, body))
    tokenizer = service.model.tokenizer
    return {
        "count": len(ids),
        "max_model_len": service.model.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None,
    }


async def detokenize(service: Service, request: Request) -> dict[str, Any]:
    """The text of token ids, control tokens spelt out."""
    body = await service.read(request, DetokenizeBody)
    service.check_model(body.model)
    if len(body.tokens) > MAX_TOKENS:
        raise RequestError(f"tokens has {len(body.tokens)} entries; the limit is {MAX_TOKENS}", "tokens")
    wrong = next((token for token in body.tokens if not 0 <= token < service.model.vocab_size), None)
    if wrong is not None:
        raise RequestError(f"tokens holds token id {wrong}; ids run from 0 to {service.model.vocab_size - 1}", "tokens")
    text = await asyncio.to_thread(service.model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


async def _of_text(service: Service, body: TokenizeBody) -> list[int]:
    for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is given, but it says nothing about prompt; it goes with messages", name)
    return await service.model.encode_off_loop(body.prompt or "", "prompt", body.add_special_tokens is not False)


async def _of_messages(service: Service, body: TokenizeBody) -> list[int]:
    if body.add_special_tokens is not None:
        raise RequestError(
            "add_special_tokens is given with messages; there the chat template alone decides", "add_special_tokens"
        )
    check_messages(body.messages or ())
    check_tools(body.tools or ())
    continued = bool(body.continue_final_message)
    return await service.model.encode_chat_off_loop(
        [message.for_template() for message in body.messages or ()],
        [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        variables=body.chat_template_kwargs or {},
    )
