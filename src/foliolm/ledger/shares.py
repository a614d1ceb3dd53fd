"""Whose time a step's time was: the shares of a row, of the others' prompts and of the others' decodes.

In a step of measured time T with predicted time t(plan), a row's own part is ``T · t(it alone) / t(plan)``, at most T;
the rest is split between the others' prompts and the others' decodes in proportion to ``t(plan) − t(plan without
them)``. All of it is whole nanoseconds. The step cost of `step_cost` is evaluated here over arrays of steps or rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foliolm.ledger.accounts import all_reduce_bytes, linear_flops

if TYPE_CHECKING:
    from foliolm.ledger.step_cost import StepCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """Nanoseconds by step: own, others' prompts, others' decodes; they sum to the steps' times."""

    own: Ints
    others_prefill: Ints
    others_decode: Ints


class Shares:
    """A step cost over arrays. Without one, every new token weighs the same.

    Args:
        cost: the step cost, or None.
    """

    def __init__(self, cost: StepCost | None) -> None:
        self.cost = cost
        self._windows: tuple[int | None, ...] = (None,)
        if cost is None:
            return
        c, model = cost.coefficients, cost.model
        self._windows = tuple(spec.window for spec in model.kv)
        compute = [
            spec.num_layers * model.decode_flops_per_pair / (c.attention * cost.attention_peak) for spec in model.kv
        ]
        self._per_token = {
            mixed: np.array(
                [
                    max(spec.bytes_per_token / (efficiency * cost.bandwidth), compute[i])
                    for i, spec in enumerate(model.kv)
                ]
            )
            for mixed, efficiency in ((False, c.kv_decode), (True, c.kv_mixed))
        }
        self._pair_s = np.array([spec.num_layers for spec in model.kv]) * (
            model.attention_flops_per_pair / (c.attention * cost.attention_peak)
        )
        self._prefix_s = np.array([spec.bytes_per_token for spec in model.kv]) * (c.prefix_reads / cost.bandwidth)

    @property
    def windowed(self) -> bool:
        """Whether some layer looks back a window only."""
        return any(self._windows)

    def base(self, tokens: Any, sampled: Any, rows: Any) -> Floats:
        """Seconds of a step but for its attention; arrays or numbers. Nothing where there are no rows."""
        tokens, sampled, rows = (np.asarray(value, dtype=np.float64) for value in (tokens, sampled, rows))
        if self.cost is None:
            return np.asarray(tokens * 1.0)
        cost, c, model = self.cost, self.cost.coefficients, self.cost.model
        read = model.body_bytes + np.where(sampled > 0, model.head_bytes, 0.0)
        if model.experts is not None:
            moe = model.experts
            missed = (1.0 - moe.experts_per_token / moe.num_experts) ** tokens
            read = read + moe.layers * moe.bytes_per_expert * moe.num_experts * (1.0 - missed)
        flops = linear_flops(model, tokens, sampled)
        linears = np.hypot(read / (c.weights * cost.bandwidth), flops / (c.matmul * cost.flops))
        total = c.step_s + c.layer_s * model.num_layers + c.sequence_s * rows + c.token_s * tokens
        total = total + linears * self._linear_factor(tokens)
        if model.tensor_parallel_size > 1:
            assert cost.peer_link is not None
            total = total + all_reduce_bytes(model, 1.0) * tokens / (c.link * cost.peer_link)
            total = total + 2 * model.num_layers * c.collective_s
        return np.asarray(np.where(rows > 0, total, 0.0))

    def _linear_factor(self, tokens: Floats) -> Floats:
        assert self.cost is not None
        knots = self.cost.linear_knots
        if not knots:
            return np.ones_like(tokens)
        at, factors = zip(*knots, strict=True)
        return np.asarray(np.interp(np.log(np.maximum(tokens, 1.0)), np.log(at), factors))

    def decode_attention(self, contexts: Any, mixed: bool) -> Floats:
        """Seconds that decode rows' attention adds, row by row."""
        contexts = np.asarray(contexts, dtype=np.float64)
        if self.cost is None:
            return np.zeros_like(contexts)
        seconds: Floats = np.zeros_like(contexts)
        for window, per_token in zip(self._windows, self._per_token[mixed], strict=True):
            seconds = seconds + per_token * (contexts if window is None else np.minimum(contexts, window))
        return seconds

    def chunk_attention(self, new: Any, context: Any, mixed: bool = True) -> Floats:
        """Seconds that chunks' attention adds, row by row; a chunk of one token reads as a decode does."""
        new, context = np.asarray(new, dtype=np.float64), np.asarray(context, dtype=np.float64)
        if self.cost is None:
            return np.zeros_like(new)
        seconds = np.zeros_like(new)
        for window, pair, prefix in zip(self._windows, self._pair_s, self._prefix_s, strict=True):
            seconds = seconds + pair * _pairs(new, context, window)
            seconds = seconds + prefix * (context if window is None else np.minimum(context, window))
        return np.where(new == 1, self.decode_attention(context, mixed), seconds + self.cost.coefficients.chunk_s)

    @staticmethod
    def split(times: Ints, whole: Floats, alone: Floats, without_prefill: Floats, without_decode: Floats) -> Split:
        """Split steps' times; see the module.

        Args:
            times: T, nanoseconds.
            whole: t(plan), seconds.
            alone: t(the row alone).
            without_prefill, without_decode: t(plan without the others' prompts), and without the others' decodes;
                equal to ``whole`` where there are none.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(whole > 0, alone / whole, 1.0)
            prompts = np.maximum(0.0, whole - without_prefill)
            decodes = np.maximum(0.0, whole - without_decode)
            both = prompts + decodes
            part = np.where(both > 0, prompts / both, 0.0)
        # Where nobody else is in the step (or adds nothing to it) the whole step is the row's own.
        own = np.where(both > 0, np.minimum(times, np.rint(times * share).astype(np.int64)), times)
        rest = times - own
        others_prefill = np.rint(rest * part).astype(np.int64)
        return Split(own, others_prefill, rest - others_prefill)


def _pairs(new: Floats, cached: Floats, window: int | None) -> Floats:
    full = new * cached + new * new / 2
    if window is None:
        return full
    grows = np.minimum(np.maximum(0.0, window - cached), new)
    return np.where(cached + new <= window, full, grows * cached + grows * grows / 2 + (new - grows) * window)
