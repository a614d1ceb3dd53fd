"""Log-probabilities in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foliolm.core.request import TokenLogprobs

if TYPE_CHECKING:
    from foliolm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no -inf; OpenAI's API documents this value for "very unlikely"


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice."""
    content = []
    for entry in entries:
        top = [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top[:num_top]]
        content.append({**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    # The text of a token that is part of a character is not text; the bytes always are what they are.
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The ``logprobs`` object of a plain completion's choice; counts offsets over the parts of a stream.

    Args:
        tokenizer: of the model.
        num_top: alternatives a token.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._seen = b""
        self._offset = 0

    def of(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object for the next tokens."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            tokens.append(self._text(entry.token_id))
            logprobs.append(_finite(entry.logprob))
            # Two tokens may read the same; the likelier one stands.
            top: dict[str, float] = {}
            for token_id, logprob in entry.top[: self._num_top]:
                top.setdefault(self._text(token_id), _finite(logprob))
            top.setdefault(tokens[-1], logprobs[-1])
            tops.append(top)
            offsets.append(self._offset)
            self._advance(self._tokenizer.token_bytes(entry.token_id))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _advance(self, raw: bytes) -> None:
        # Characters, not bytes: a character that spans tokens counts where it is complete.
        pending = self._seen + raw
        text = pending.decode("utf-8", "ignore")
        complete = len(text.encode("utf-8"))
        self._offset += len(text)
        self._seen = pending[complete:] if pending[:complete] == text.encode("utf-8") else b""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
