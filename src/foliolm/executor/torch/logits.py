"""Changing a row's logits before a token is chosen: biases, bans, penalties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.history import History


def edit_logits(
    row: Tensor, params: SamplingParams, end_ids: Sequence[int], output: Sequence[int], history: History | None
) -> None:
    """Apply in place, in this order: bias, penalties, allowed tokens, bad words, end tokens before ``min_tokens``.

    Args:
        row: [V] float32.
        params: what the request asked for.
        end_ids: tokens that end it.
        output: what it has generated so far.
        history: its distinct tokens; given where there are penalties.
    """
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        # Not row[ids] += …: an id that is named twice is biased twice.
        row.index_add_(0, _ids(ids, row), torch.tensor(biases, dtype=row.dtype, device=row.device))
    if history is not None:
        _penalise(row, params, history)
    if params.allowed_token_ids is not None:
        allowed = torch.from_numpy(_allowed(params.allowed_token_ids)).to(row.device)
        kept = row[allowed]
        row.fill_(-math.inf)
        row[allowed] = kept
    banned = [word[-1] for word in params.bad_words_token_ids if word and _just_said(output, word[:-1])]
    if len(output) < params.min_tokens:
        banned += end_ids
    banned = [token for token in banned if token < len(row)]
    if banned:
        row[_ids(banned, row)] = -math.inf


def _penalise(row: Tensor, params: SamplingParams, history: History) -> None:
    ids = torch.from_numpy(history.ids).to(row.device)
    counts = torch.from_numpy(history.counts).to(row.device)
    values = row[ids]
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        values = torch.where(values > 0, values / factor, values * factor)
    values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    row[ids] = values


@lru_cache(maxsize=256)
def _allowed(ids: tuple[int, ...]) -> NDArray[np.int64]:
    """The same long list is asked for at every step of a request."""
    return np.array(ids, np.int64)


def _just_said(output: Sequence[int], words: tuple[int, ...]) -> bool:
    return not words or (len(output) >= len(words) and tuple(output[-len(words) :]) == words)


def _ids(ids: Sequence[int], row: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=row.device)
