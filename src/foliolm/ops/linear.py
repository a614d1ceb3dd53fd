"""Matrix products with constant weights: y = x · Wᵀ + b."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

PACK_ROWS = 16
"""Rows for which oneDNN is asked to choose a weight layout. Measured with float32 on AVX2 (x rows 1, 4, 16, 64, 512):
a layout chosen for 16 is within 6% of the best at every one of them, and 1.2 to 1.8 times as fast as MKL."""


class Linear(Protocol):
    """A constant matrix, laid out as its backend likes.

    Attributes:
        nbytes: bytes that it occupies.
    """

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [N, in] to [N, out], same dtype."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` [N, out] + this(``x`` [N, in]); changes neither."""
        ...


class PlainLinear:
    """The weight as it is, [out, in]; whatever PyTorch does best with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.nbytes = _nbytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [N, in] to [N, out]."""
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` + this(``x``)."""
        if self._bias is None:
            return torch.addmm(residual, x, self._weight.t())
        return residual + functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A oneDNN weight, reordered once at load; the residual's addition runs inside the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary
        self.nbytes = _nbytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [N, in] to [N, out]."""
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` + this(``x``)."""
        y: Tensor = self._sum(x, residual, self._weight, self._bias, "add")
        return y


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest general implementation for a weight [out, in] where it lies."""
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype natively on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _nbytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
