"""What the library's calls return."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.core.request import RequestStamps, TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: from 0 to ``n − 1``.
        text, token_ids: generated; an end token is among the ids, not in the text.
        logprobs: one entry a token, where asked for.
        cumulative_logprob: their sum, where asked for.
        finish_reason: ``stop`` or ``length``; None while it goes on.
        stop_reason: the stop string or stop token id that ended it, where one did.
        stamps: monotonic nanoseconds at the turns of its life; None where a stop string ended it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None
    stamps: RequestStamps | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        prompt: the text, where the prompt was text.
        prompt_token_ids: what the model read.
        prompt_logprobs: one entry a prompt token (the first is None), where asked for.
        outputs: ``n`` completions.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]

    @property
    def finished(self) -> bool:
        """True once every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)
