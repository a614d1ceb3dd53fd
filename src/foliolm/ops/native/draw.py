"""Tokens drawn by the kernels: no softmax over the vocabulary, no sort, one call for all rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foliolm.ops.native.library import Library

DRAW = np.dtype([(name, np.float64) for name in ("temperature", "min_p", "top_k", "top_p", "uniform")])
"""How a row's token is chosen, field by field as ``Draw`` of ``csrc/draw.h``.

    temperature: logits are divided by it, in float32; 0: the likeliest token.
    min_p: tokens less likely than this share of the likeliest go; 0: none.
    top_k: the k likeliest tokens stay; below 1, or the vocabulary's size: all.
    top_p: of those, the fewest likeliest that have this share of what is left; 1: all.
    uniform: in [0, 1), the place of the draw among the weights in the vocabulary's order.

Tokens as likely as the last that stays stay too.
"""

FEW_LOGITS = 1 << 17
"""Of a call at most: one thread is done with them about as soon as another would be awake."""


class DrawCall:
    """A call of the kernels, made ready: who draws from the same memory again keeps it.

    Args:
        library: the kernels.
        logits: [S, V] float32 on the CPU, contiguous; entries may be −inf.
        draws: [S] of ``DRAW``.

    Attributes:
        logits, draws: as given; what is in them when the call runs counts.
        logits_pointer: where the logits lie.

    Raises:
        ValueError: an array has another type or size.
    """

    def __init__(self, library: Library, logits: Tensor, draws: NDArray[np.void]) -> None:
        rows, width = logits.shape
        if len(draws) != rows or draws.dtype != DRAW or not draws.flags.c_contiguous:
            raise ValueError(f"draws hold {len(draws)} of {draws.dtype}; the logits have {rows} rows")
        if logits.dtype.itemsize != 4 or not logits.dtype.is_floating_point or not logits.is_contiguous():
            raise ValueError(f"logits are {logits.dtype}, strides {logits.stride()}; they must be contiguous float32")
        self._library, self._rows, self._width = library, rows, width
        self.logits, self.draws, self.logits_pointer = logits, draws, logits.data_ptr()
        self._best, self._tokens = np.empty(rows, np.float32), np.empty(rows, np.int64)
        self._pointers = draws.ctypes.data, self._best.ctypes.data, self._tokens.ctypes.data

    def run(self, threads: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Choose a token of each row.

        Tokens less likely than e^−60 times the likeliest are never drawn: a sum in float64 does not notice them.

        Args:
            threads: that share the rows, where there are more than a few logits; the tokens do not depend on them.

        Returns:
            [S] each row's largest logit, NaN if it has one; [S] its token. Where the largest logit is not finite, that
            is the least token that has it.

        Raises:
            RuntimeError: the kernels failed (memory).
        """
        draws, best, tokens = self._pointers
        calls = self._library.calls
        if self._rows * self._width <= FEW_LOGITS:
            threads = 1
        self._library.check(
            calls.folio_draw(self.logits_pointer, self._rows, self._width, draws, threads, best, tokens)
        )
        return self._best.copy(), self._tokens.copy()
