"""Beam search: which continuations live on, which have finished, and when no better one can come.

The rules are those of transformers' ``generate(num_beams=…)``, so that both find the same hypotheses: the best
``max(2, 1 + end ids) · width`` continuations are looked at; only the best ``width`` of them may finish; a finished one
counts its sum of log-probabilities over its length to the power of the length penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foliolm.core.request import TokenLogprobs
from foliolm.core.sampling import BeamSearch

Candidates = Sequence[tuple[int, float]]
"""(token id, log-probability) pairs of one hypothesis, likeliest first."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation of the prompt.

    Attributes:
        total: sum of its tokens' log-probabilities.
        score: ``total / tokens ** length_penalty`` of a finished one.
        logprobs: one entry a token.
    """

    total: float = 0.0
    score: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens, the end token included."""
        return tuple(entry.token_id for entry in self.logprobs)


class BeamScorer:
    """The hypotheses of one prompt, without their KV.

    Args:
        beam: what was asked for.
        end_ids: tokens that finish a hypothesis.
        max_new_tokens: all that live have finished at this length.
        num_logprobs: alternatives to report a token.
    """

    def __init__(
        self, beam: BeamSearch, end_ids: frozenset[int], max_new_tokens: int, num_logprobs: int | None = None
    ) -> None:
        self._beam = beam
        self._end_ids = end_ids
        self._max_new_tokens = max_new_tokens
        self._num_logprobs = num_logprobs or 0
        self._improvable = True
        self.length = 0
        self.live: list[Hypothesis] = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.done = False

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """One more token for each that lives.

        Args:
            candidates: by live hypothesis.

        Returns:
            For each that lives now, the place of the one that it continues among those that lived before.
        """
        width = self._beam.width
        best = sorted(
            (
                (self.live[place].total + logprob, place, token, logprob, rank)
                for place, pairs in enumerate(candidates)
                for rank, (token, logprob) in enumerate(pairs, 1)
            ),
            key=lambda one: (-one[0], one[1], one[4]),
        )[: self._beam.num_candidates(len(self._end_ids))]
        self.length += 1
        at_end = self.length >= self._max_new_tokens
        ends = [at_end or one[2] in self._end_ids for one in best]
        before = self.live
        going_on = [one for one, end in zip(best, ends, strict=True) if not end][:width]
        self.live = [self._grown(before, one, candidates) for one in going_on]
        full = len(self.finished) == width
        if self._improvable and not (full and self._beam.early_stopping is True):
            self._finish(
                [self._grown(before, one, candidates) for one, end in zip(best[:width], ends, strict=False) if end]
            )
        self._improvable = self._improvable and self._may_improve()
        full = len(self.finished) == width
        self.done = not self._improvable or (full and self._beam.early_stopping is True) or all(ends)
        return [one[1] for one in going_on]

    def results(self) -> list[Hypothesis]:
        """The hypotheses, best first: those that finished, then, where there are too few, those that live."""
        missing = self._beam.width - len(self.finished)
        return self.finished + [self._scored(one) for one in self.live[:missing]]

    def is_stopped(self, hypothesis: Hypothesis) -> bool:
        """True if an end token finished it, not its length."""
        return bool(hypothesis.logprobs) and hypothesis.logprobs[-1].token_id in self._end_ids

    def _grown(
        self, before: list[Hypothesis], one: tuple[float, int, int, float, int], candidates: Sequence[Candidates]
    ) -> Hypothesis:
        total, place, token, logprob, rank = one
        entry = TokenLogprobs(token, logprob, rank, tuple(candidates[place][: self._num_logprobs]))
        return Hypothesis(total, logprobs=(*before[place].logprobs, entry))

    def _scored(self, one: Hypothesis) -> Hypothesis:
        return Hypothesis(one.total, one.total / len(one.logprobs) ** self._beam.length_penalty, one.logprobs)

    def _finish(self, ended: list[Hypothesis]) -> None:
        merged = self.finished + [self._scored(one) for one in ended]
        merged.sort(key=lambda one: -one.score)
        self.finished = merged[: self._beam.width]

    def _may_improve(self) -> bool:
        """Whether the best that lives could still beat the worst that has finished, by the rule that was asked for."""
        if len(self.finished) < self._beam.width or not self.live:
            return len(self.finished) < self._beam.width
        penalty = self._beam.length_penalty
        far = self._beam.early_stopping == "never" and penalty > 0
        length = self._max_new_tokens if far else self.length
        return bool(self.live[0].total / length**penalty > self.finished[-1].score)
