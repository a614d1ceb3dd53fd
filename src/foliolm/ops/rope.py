"""Rotary position embedding on half-split heads: dimension i turns with dimension i + D/2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """A step's angles, made once and used by every layer.

    Attributes:
        cos: [N, 1, D].
        sin: [N, 1, D]; its first half negated, so that a swap of the halves is all that a rotation needs.
    """

    cos: Tensor
    sin: Tensor


def make_rotation(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
    """Angles for tokens at ``positions``.

    Args:
        positions: [N] integers.
        frequencies: [D/2] float32, radians a position.
        scale: multiplies cosine and sine (YaRN's attention factor; else 1).
        dtype: of the result; the angles are float32.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = torch.cos(angles), torch.sin(angles)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    both = torch.cat((cos, cos), dim=-1).to(dtype)
    signed = torch.cat((-sin, sin), dim=-1).to(dtype)
    return Rotation(both[:, None, :], signed[:, None, :])


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head: [N, heads, D], strided or not, to a new contiguous tensor."""
    n, heads, dim = x.shape
    out = x * rotation.cos
    swapped = x.reshape(n, heads, 2, dim // 2).flip(-2).view(n, heads, dim)
    return out.addcmul_(swapped, rotation.sin)
