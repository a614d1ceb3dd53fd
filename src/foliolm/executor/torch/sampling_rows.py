"""Sampling parameters by slot, as arrays, so that a batch of requests is sampled by vector operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foliolm.core.sampling import SamplingParams


class SamplingRows:
    """One entry a slot.

    Attributes:
        temperature, top_p, min_p: float64.
        top_k: int64; the vocabulary's size keeps all.
        greedy: the likeliest token is taken.
        edited: the logits may be changed before that (penalties, bias, bans, grammar).
        logprobs: alternatives to report, −1 for no logprobs.
        plain: not edited, and nothing reported.
        problem: a sentence where the parameters name tokens that do not exist.
    """

    def __init__(self, size: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.temperature: NDArray[np.float64] = np.ones(size)
        self.top_p: NDArray[np.float64] = np.ones(size)
        self.min_p: NDArray[np.float64] = np.zeros(size)
        self.top_k: NDArray[np.int64] = np.full(size, num_tokens)
        self.greedy: NDArray[np.bool_] = np.ones(size, np.bool_)
        self.edited: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.logprobs: NDArray[np.int64] = np.full(size, -1)
        self.plain: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.problem: list[str | None] = [None] * size

    def grow(self, size: int) -> None:
        """Make room for ``size`` slots."""
        more = size - len(self.problem)
        for name in ("temperature", "top_p", "min_p", "top_k", "greedy", "edited", "logprobs", "plain"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.problem.extend([None] * more)

    def set(self, slot: int, params: SamplingParams) -> None:
        """Fill a slot."""
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.top_k[slot] = min(params.top_k, self._num_tokens) if params.top_k > 0 else self._num_tokens
        self.greedy[slot] = params.greedy
        self.logprobs[slot] = -1 if params.logprobs is None else min(params.logprobs, self._num_tokens)
        self.problem[slot] = self._problem(params)
        self.edited[slot] = bool(
            params.needs_history
            or params.min_tokens
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.grammar is not None
            or self.problem[slot]
        )
        self.plain[slot] = bool(not self.edited[slot] and self.logprobs[slot] < 0)

    def search(self, slot: int, num_candidates: int) -> None:
        """The slot's request is a hypothesis of a beam search: what may follow it is reported, not drawn."""
        self.greedy[slot] = True
        self.logprobs[slot] = min(num_candidates, self._num_tokens)
        self.plain[slot] = False

    def fail(self, slot: int, problem: str) -> None:
        """The slot's request cannot be sampled for."""
        self.problem[slot] = problem
        self.edited[slot] = True
        self.plain[slot] = False

    def _problem(self, params: SamplingParams) -> str | None:
        for name, ids in (
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            if ids and max(ids) >= self._num_tokens:
                return f"{name} holds token id {max(ids)}; the model's ids are below {self._num_tokens}"
        return None
