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


def draw(
    library: Library, logits: Tensor, draws: NDArray[np.void], threads: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Choose a token of each row.

    Tokens less likely than e^−60 times the likeliest are never drawn: a sum in float64 does not notice them.

    Args:
        library: the kernels.
        logits: [S, V] float32 on the CPU, contiguous; entries may be −inf.
        draws: [S] of ``DRAW``.
        threads: that share the rows; the tokens do not depend on them.

    Returns:
        [S] each row's largest logit, NaN if it has one; [S] its token. Where the largest logit is not finite, that is
        the least token that has it.

    Raises:
        ValueError: an array has another type or size.
        RuntimeError: the kernels failed (memory).
    """
    rows, width = logits.shape
    if len(draws) != rows or draws.dtype != DRAW or not draws.flags.c_contiguous:
        raise ValueError(f"draws hold {len(draws)} of {draws.dtype}; the logits have {rows} rows")
    if logits.dtype.itemsize != 4 or not logits.dtype.is_floating_point or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype}, strides {logits.stride()}; they must be contiguous float32")
    best, tokens = np.empty(rows, np.float32), np.empty(rows, np.int64)
    library.check(
        library.calls.folio_draw(
            logits.data_ptr(), rows, width, draws.ctypes.data, threads, best.ctypes.data, tokens.ctypes.data
        )
    )
    return best, tokens
