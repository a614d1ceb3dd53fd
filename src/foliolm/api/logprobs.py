"""Log-probabilities in the shapes that OpenAI's two endpoints have, and in vLLM's for prompts."""

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


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities: by token id the likeliest and the prompt's own; null for the first token."""
    return [None if entry is None else _by_id(tokenizer, entry, num_top) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:num_top], 1)}
    ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for token, (logprob, rank) in ranked.items()
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    # The text of a token that is part of a character is not text; the bytes always are what they are.
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The ``logprobs`` object of a plain completion's choice; counts offsets over the parts of a stream.

    Args:
        tokenizer: of the model.
        num_top: alternatives a token.
        skipped: tokens that are left out of the text; they take no room in it.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, skipped: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skipped = skipped
        self._seen = b""
        self._offset = 0

    def of(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object for the next tokens."""
        found = _empty()
        for entry in entries:
            raw = b"" if entry.token_id in self._skipped else self._tokenizer.token_bytes(entry.token_id)
            self._add(found, self._text(entry.token_id), raw, entry)
        return found

    def of_prompt(self, spelt: Sequence[bytes], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The object for a prompt that the text begins with.

        Args:
            spelt: what each of its tokens adds to the text.
            entries: theirs; None for the first.
        """
        found = _empty()
        for raw, entry in zip(spelt, entries, strict=True):
            self._add(found, _shown(raw), raw, entry)
        return found

    def _add(self, found: dict[str, Any], text: str, raw: bytes, entry: TokenLogprobs | None) -> None:
        found["tokens"].append(text)
        found["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        found["top_logprobs"].append(None if entry is None else self._top(text, entry))
        found["text_offset"].append(self._offset)
        self._advance(raw)

    def _top(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        # Two tokens may read the same; the likelier one stands.
        top: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._num_top]:
            top.setdefault(self._text(token_id), _finite(logprob))
        top.setdefault(text, _finite(entry.logprob))
        return top

    def _text(self, token_id: int) -> str:
        return _shown(self._tokenizer.token_bytes(token_id))

    def _advance(self, raw: bytes) -> None:
        # Characters, not bytes: a character that spans tokens counts where it is complete.
        pending = self._seen + raw
        text = pending.decode("utf-8", "ignore")
        complete = len(text.encode("utf-8"))
        self._offset += len(text)
        self._seen = pending[complete:] if pending[:complete] == text.encode("utf-8") else b""


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One ``logprobs`` object of a plain completion, of two that follow each other."""
    return {name: first[name] + second[name] for name in first}


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _shown(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
