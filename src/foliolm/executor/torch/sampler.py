"""From logits to tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foliolm.core.grammar import GrammarState
from foliolm.core.request import TokenLogprobs
from foliolm.executor.torch.asked_draws import AskedDraws
from foliolm.executor.torch.draws import uniforms
from foliolm.executor.torch.logits import edit_logits
from foliolm.executor.torch.requests import RequestTable
from foliolm.model.likeliest import likeliest
from foliolm.ops.native.draw import DrawCall
from foliolm.ops.native.library import Library

FIRST_CANDIDATES = 512
"""Likeliest tokens that top-p looks at first; only where they do not reach p are more sorted."""
NOT_FINITE = "the model's logits are not finite"
NOTHING_LEFT = (
    "no token may be sampled: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar together forbid all"
)


@dataclass(slots=True)
class Sampled:
    """Tokens of the sampled rows.

    Attributes:
        tokens: [S]; meaningless where ``errors`` has the row.
        logprobs: by row, for those that asked.
        errors: by row, a sentence.
        ended: rows whose grammar ended with their token.
    """

    tokens: NDArray[np.int64]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class Sampler:
    """Chooses tokens; keeps no state of its own: all of it is the requests' (their grammars go on with each token).

    Args:
        table: the requests.
        library: the kernels that choose tokens; None: PyTorch's operators, which give the same ones but for rounding.
    """

    def __init__(self, table: RequestTable, library: Library | None = None) -> None:
        self._table = table
        self._library = library
        self._asked = AskedDraws(table)

    def asked(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """[S] of ``DRAW``: what rows ask for, greedy ones included, and their random numbers; see ``AskedDraws``."""
        return self._asked.of(slots)

    def plain(self, best: NDArray[np.float32], tokens: NDArray[np.int64]) -> Sampled:
        """As ``sample``, for rows that are all plain (see ``SamplingRows``).

        Args:
            best: [S] each row's largest logit.
            tokens: [S] the row's token.
        """
        # After a model went through the caches a walk over a short list is quicker than an array's operators.
        errors = {row: NOT_FINITE for row, value in enumerate(best.tolist()) if not math.isfinite(value)}
        return Sampled(tokens, errors=errors)

    def sample(self, logits: Tensor, slots: NDArray[np.int64]) -> Sampled:
        """One token a row; appends nothing but to grammars.

        Args:
            logits: [S, V] float32 as the model gave them; may be changed.
            slots: [S] the rows' requests.
        """
        rows = self._table.sampling_rows
        edited = np.flatnonzero(rows.edited[slots])
        reported = np.flatnonzero(rows.logprobs[slots] >= 0)
        errors: dict[int, str] = {}
        raw = logits
        if len(edited):
            if np.intersect1d(edited, reported).size:
                logits = raw.clone()  # logprobs are of the raw ones
            self._edit(logits, edited, slots, errors)
        if self._library is None:
            best, tokens = likeliest(logits)
        else:
            best, tokens = DrawCall(self._library, logits, self.asked(slots)).run(torch.get_num_threads())
        for row in np.flatnonzero(~np.isfinite(best)).tolist():
            errors.setdefault(row, NOTHING_LEFT if rows.edited[slots[row]] and best[row] == -math.inf else NOT_FINITE)
        if self._library is None:
            random = np.array([row for row in np.flatnonzero(~rows.greedy[slots]) if row not in errors], np.int64)
            if len(random):
                chosen = logits if len(random) == len(slots) else logits[torch.from_numpy(random).to(logits.device)]
                tokens[random] = self._draw(chosen, slots[random])
        sampled = Sampled(tokens, errors=errors)
        for row in edited.tolist():
            grammar = self._table.grammar[int(slots[row])]
            if grammar is not None and row not in errors:
                self._advance(grammar, row, sampled)
        for row in reported.tolist():
            if row not in errors:
                count = int(rows.logprobs[slots[row]])
                (sampled.logprobs[row],) = token_logprobs(raw[row : row + 1], tokens[row : row + 1], count)
        return sampled

    def _edit(
        self, logits: Tensor, edited: NDArray[np.int64], slots: NDArray[np.int64], errors: dict[int, str]
    ) -> None:
        table = self._table
        for row in edited.tolist():
            slot = int(slots[row])
            params, problem = table.sampling[slot], table.sampling_rows.problem[slot]
            assert params is not None
            if problem is not None:
                errors[row] = problem
                continue
            output: list[int] = []
            if params.bad_words_token_ids or params.min_tokens:
                output = table.tokens[slot, table.prompt_lengths[slot] : table.lengths[slot]].tolist()
            edit_logits(logits[row], params, table.end_ids[slot], output, table.history[slot])
        self._mask(logits, [row for row in edited.tolist() if row not in errors], slots, errors)

    def _mask(self, logits: Tensor, edited: list[int], slots: NDArray[np.int64], errors: dict[int, str]) -> None:
        """Forbid what grammars forbid, in the rows that have one."""
        table = self._table
        states = [(row, state) for row in edited if (state := table.grammar[int(slots[row])]) is not None]
        if not states or table.grammars is None:
            return
        raw = np.frombuffer(table.grammars.masks([state for _, state in states]), np.uint8).reshape(len(states), -1)
        allowed = np.unpackbits(raw, axis=1, bitorder="little")[:, : logits.shape[1]]
        forbidden = torch.from_numpy(allowed == 0)
        if forbidden.shape[1] < logits.shape[1]:
            forbidden = torch.nn.functional.pad(forbidden, (0, logits.shape[1] - forbidden.shape[1]), value=True)
        at = torch.tensor([row for row, _ in states], device=logits.device)
        logits[at] = logits[at].masked_fill(forbidden.to(logits.device), -math.inf)
        for row, state in states:
            if state.error is not None:
                errors[row] = state.error

    def _advance(self, grammar: GrammarState, row: int, sampled: Sampled) -> None:
        grammar.accept(int(sampled.tokens[row]))
        if grammar.error is not None:
            sampled.errors[row] = grammar.error
        elif grammar.ended:
            sampled.ended.add(row)

    def _draw(self, logits: Tensor, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw from softmax(logits / temperature), cut by min-p, then top-k, then top-p.

        The cuts are thresholds on the logits and the draw walks the vocabulary in order, so that a row's token does not
        depend on how the others sort.
        """
        table, rows, device = self._table, self._table.sampling_rows, logits.device
        temperature = torch.from_numpy(rows.temperature[slots]).to(device, torch.float32)
        x = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
        floor = torch.full((len(slots),), -math.inf, device=device)
        self._cut_min_p(floor, rows.min_p[slots])
        self._cut_top_k(x, floor, rows.top_k[slots])
        self._cut_top_p(x, floor, rows.top_p[slots])
        weights = torch.exp(x).masked_fill_(x < floor[:, None], 0.0)
        ends = weights.cumsum(dim=-1, dtype=torch.float64)
        total = ends[:, -1]
        draws = uniforms(table.keys[slots], table.lengths[slots] - table.prompt_lengths[slots])
        # Rounding must not carry a draw to the very end, where the tokens may all be cut.
        target = torch.minimum(
            torch.from_numpy(draws).to(device) * total, torch.nextafter(total, torch.zeros_like(total))
        )
        found: NDArray[np.int64] = torch.searchsorted(ends, target[:, None], right=True)[:, 0].cpu().numpy()
        return found

    def _cut_min_p(self, floor: Tensor, min_p: NDArray[np.float64]) -> None:
        cut = np.flatnonzero(min_p > 0)
        if len(cut):
            at = torch.from_numpy(cut).to(floor.device)
            floor[at] = torch.from_numpy(np.log(min_p[cut])).to(floor.device, floor.dtype)

    def _cut_top_k(self, x: Tensor, floor: Tensor, top_k: NDArray[np.int64]) -> None:
        cut = np.flatnonzero(top_k < x.shape[1])
        if len(cut):
            at = torch.from_numpy(cut).to(x.device)
            largest = torch.topk(x[at], int(top_k[cut].max()), dim=-1).values
            kth = largest.gather(1, torch.from_numpy(top_k[cut] - 1).to(x.device)[:, None])[:, 0]
            floor[at] = torch.maximum(floor[at], kth)

    def _cut_top_p(self, x: Tensor, floor: Tensor, top_p: NDArray[np.float64]) -> None:
        """The least likely token of the smallest set whose share of what the other cuts left is at least p."""
        left = np.flatnonzero(top_p < 1.0)
        count = FIRST_CANDIDATES
        while len(left):
            at = torch.from_numpy(left).to(x.device)
            part, low = x[at], floor[at]
            mass = torch.exp(part).masked_fill_(part < low[:, None], 0.0).sum(dim=-1, dtype=torch.float64)
            count = min(count, x.shape[1])
            largest = torch.topk(part, count, dim=-1).values
            reached = torch.exp(largest).masked_fill_(largest < low[:, None], 0.0).cumsum(dim=-1, dtype=torch.float64)
            wanted = torch.from_numpy(top_p[left]).to(x.device) * mass
            enough = reached[:, -1] >= wanted
            if count == x.shape[1]:
                enough = torch.ones_like(enough)  # all there is: what is missing is rounding
            index = (reached < wanted[:, None]).sum(dim=-1).clamp_(max=count - 1)
            last = largest.gather(1, index[:, None])[:, 0]
            floor[at] = torch.where(enough, torch.maximum(low, last), low)
            left = left[~enough.cpu().numpy()]
            count *= 8


def token_logprobs(logits: Tensor, tokens: NDArray[np.int64], count: int) -> list[TokenLogprobs]:
    """Natural log-probabilities of ``tokens`` and of the ``count`` likeliest, by the raw logits.

    Args:
        logits: [S, V] float32, finite.
        tokens: [S].
        count: alternatives a row.
    """
    at = torch.from_numpy(tokens).to(logits.device)[:, None]
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = logits.gather(1, at)
    ranks = ((logits > own).sum(dim=-1) + 1).tolist()
    # Rounding may lift a certainty above 0.
    chosen = (own - norm).clamp_(max=0.0)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if count:
        values, ids = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
        pairs = zip(ids.tolist(), (values - norm).clamp_(max=0.0).tolist(), strict=True)
        tops = [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    return [TokenLogprobs(int(token), chosen[i], ranks[i], tops[i]) for i, token in enumerate(tokens)]
