"""The gated activation of the MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) · up``: [N, 2I], gate first, to [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
