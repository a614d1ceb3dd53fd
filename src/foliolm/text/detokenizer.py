"""Text of tokens as they come, without ever splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from foliolm.text.tokenizer import Tokenizer

_MOST_BYTES = 4  # of a character in UTF-8


class Detokenizer:
    """Turns tokens into text one at a time, in constant time each.

    It works on bytes: what is not yet a whole character stays inside until it is, or until the end. The parts add up to
    the text of all tokens at once, however they come.

    Args:
        tokenizer: of the model.
        prompt_ids: what the tokens continue. If it ends within a character, the first tokens complete it, and the
            character belongs to them.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._open_bytes(prompt_ids))

    def push(self, token_id: int) -> str:
        """The characters that this token completes.

        Raises:
            RequestError: the id does not exist.
        """
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _open_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The bytes of the character that the prompt leaves open, or nothing."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id in self._skipped:
                break
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _MOST_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return decoder.getstate()[0]
