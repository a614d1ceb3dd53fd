"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (Zhang & Sennrich 2019, eq. 4).

    Args:
        x: [..., D]; half precisions are normalised in float32.
        weight: [D], or None for ones.
        eps: added to the mean square.
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
