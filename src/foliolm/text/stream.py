"""The text of one answer as its tokens come: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from foliolm.core.sampling import SamplingParams
from foliolm.text.detokenizer import Detokenizer
from foliolm.text.stop import StopStrings
from foliolm.text.tokenizer import Tokenizer


def answer_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams) -> TextStream | TextAtEnd:
    """The text of an answer that nobody reads before its end: made then at once, where no stop string may end it."""
    make = TextStream if sampling.stop else TextAtEnd
    return make(tokenizer, prompt_ids, sampling)


class TextAtEnd:
    """The same text as ``TextStream``'s, all of it from ``flush``; for answers without stop strings.

    Args:
        tokenizer: of the model.
        prompt_ids: what the answer continues.
        sampling: its ``skip_special_tokens`` is honoured.
    """

    stop_reason: str | None = None

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if sampling.stop:
            raise ValueError(f"stop strings {sampling.stop!r} must be looked for as tokens come")
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._skip_special_tokens = sampling.skip_special_tokens
        self._token_ids: list[int] = []

    def push(self, token_id: int) -> str:
        """Nothing yet."""
        self._token_ids.append(token_id)
        return ""

    def flush(self) -> str:
        """The whole text.

        Raises:
            RequestError: an id does not exist.
        """
        detokenizer = Detokenizer(self._tokenizer, self._prompt_ids, self._skip_special_tokens)
        token_ids, self._token_ids = self._token_ids, []
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


class TextStream:
    """Detokeniser and stop strings of one answer.

    Args:
        tokenizer: of the model.
        prompt_ids: what the answer continues; stop strings are looked for in the answer alone.
        sampling: its ``stop``, ``include_stop_str_in_output``, ``min_tokens`` and ``skip_special_tokens`` are honoured.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, sampling.skip_special_tokens)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output, sampling.min_tokens)
        self._num_tokens = 0

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, or None."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """Text that is certain after this token. Nothing more may be pushed once a stop string was found."""
        self._num_tokens += 1
        return self._stops.push(self._detokenizer.push(token_id), self._num_tokens)

    def flush(self) -> str:
        """Text that was held back; may find a stop string in it."""
        if self._stops.found is not None:
            return ""
        return self._stops.push(self._detokenizer.flush(), self._num_tokens) + self._stops.flush()
