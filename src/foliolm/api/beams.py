"""Beam search of the library, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.api.results import RequestOutput
from foliolm.core.request import TokenLogprobs
from foliolm.core.sampling import BeamSearch, SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What to search for.

    Attributes:
        beam_width: hypotheses that are kept alive, and returned.
        max_tokens: most tokens of a hypothesis.
        ignore_eos: end tokens are ordinary tokens.
        length_penalty, early_stopping: see ``BeamSearch``.

    Raises:
        RequestError: from ``sampling``: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def sampling(self) -> SamplingParams:
        """As an engine takes it."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=0,
            beam=BeamSearch(self.beam_width, self.length_penalty, self.early_stopping),
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis.

    Attributes:
        tokens: of the prompt and behind it, the end token included.
        logprobs: one entry a token behind the prompt.
        cum_logprob: their sum.
        score: ``cum_logprob / tokens behind the prompt ** length_penalty``, by which hypotheses are ranked.
        text: of what stands behind the prompt.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the end token's id, where one ended it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cum_logprob: float
    score: float
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """A prompt's hypotheses, best first."""

    sequences: tuple[BeamSearchSequence, ...]


def searched(output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """The hypotheses of a prompt's completions."""
    sequences = []
    for one in output.outputs:
        total = sum(entry.logprob for entry in one.logprobs or ())
        sequences.append(
            BeamSearchSequence(
                tokens=(*output.prompt_token_ids, *one.token_ids),
                logprobs=one.logprobs or (),
                cum_logprob=total,
                score=total / max(1, len(one.token_ids)) ** params.length_penalty,
                text=one.text,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
        )
    return BeamSearchOutput(tuple(sequences))
