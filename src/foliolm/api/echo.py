"""A completion's prompt, repeated before its answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foliolm.text.tokenizer import Tokenizer


class EchoedPrompt:
    """A prompt as the text that its tokens spell: what the model read, which is what its logprobs are about.

    A begin token that the tokenizer set before a text is no part of it. A character that the prompt leaves open belongs
    to the answer that completes it.

    Args:
        tokenizer: of the model.
        prompt: the client's prompt: a text, or token ids.
        token_ids: the prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str | Sequence[int], token_ids: Sequence[int]) -> None:
        self.spelt = [tokenizer.token_bytes(token) for token in token_ids]
        if isinstance(prompt, str):
            begin = tokenizer.bos_token_id
            lead = 0
            if begin is not None and token_ids[0] == begin and not prompt.startswith(tokenizer.token_text(begin)):
                self.spelt[0], lead = b"", 1
            # Some tokenizers write a space before a text, and take it away again.
            if lead < len(self.spelt) and self.spelt[lead][:1] == b" " and not prompt.startswith(" "):
                self.spelt[lead] = self.spelt[lead][1:]
        self._raw = b"".join(self.spelt)

    def text(self, continued: bool) -> str:
        """The text.

        Args:
            continued: an answer follows, and completes the character that is open at the end.
        """
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self._raw, final=not continued)
