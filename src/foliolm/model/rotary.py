"""Rotary frequencies of a model, plain or stretched beyond the trained context."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foliolm.core.errors import ModelError
from foliolm.shape.model import ModelShape, RopeScaling


def rotary_frequencies(shape: ModelShape, factors: Any = None) -> tuple[Tensor, float]:
    """Radians a position for each pair of a head's dimensions.

    Args:
        shape: gives base, head size and scaling.
        factors: [D/2] divisors as GGUF files carry them (``rope_freqs``); they already hold a ``llama3`` scaling.

    Returns:
        [D/2] float32, and the factor that cosine and sine are multiplied by.

    Raises:
        ModelError: an unknown scaling, one without its trained context, or factors of another size.
    """
    half = shape.head_dim // 2
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, half, dtype=torch.float32) * 2 / shape.head_dim)
    scaling = shape.rope_scaling
    if factors is not None:
        divisors = torch.as_tensor(factors, dtype=torch.float32).flatten()
        if divisors.numel() != half:
            raise ModelError(f"rope_freqs has {divisors.numel()} values; head_dim {shape.head_dim} needs {half}")
        frequencies = frequencies / divisors
        if scaling is not None and scaling.kind == "llama3":
            scaling = None
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(frequencies, shape, scaling)
    raise ModelError(f"RoPE scaling {scaling.kind!r} is not supported; supported are linear, llama3 and yarn")


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    turns = _trained_context(scaling) * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, shape: ModelShape, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, section 3.2 and 3.4): blend by dimension, and a temperature on the attention."""
    dim, base, trained = shape.head_dim, shape.rope_theta, _trained_context(scaling)

    def dimension_of(turns: float) -> float:
        """The dimension whose wavelength turns so often within the trained context."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    blended = stretched * frequencies / scaling.factor + (1 - stretched) * frequencies
    return blended, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _trained_context(scaling: RopeScaling) -> int:
    if not scaling.original_max_position:
        raise ModelError(f"RoPE scaling {scaling.kind!r} needs original_max_position_embeddings, which is not set")
    return scaling.original_max_position
