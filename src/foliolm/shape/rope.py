"""Rotary position embedding as configs write it: the base, and how it is stretched.

transformers 5 writes one ``rope_parameters``; older configs a ``rope_theta`` beside a ``rope_scaling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foliolm.shape.fields import Fields
from foliolm.shape.model import RopeScaling

SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Base of the frequencies, and their scaling or None."""

    theta: float
    scaling: RopeScaling | None


def read_rope(fields: Fields) -> Rope:
    """Read ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Raises:
        ModelError: the kind is none of ``SUPPORTED_KINDS``, or one of its parameters is missing or senseless.
    """
    theta = fields.number("rope_theta", default=10000.0)
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    raw = fields.get(key)
    if not raw:
        _check_partial(fields)
        return Rope(theta, None)
    if not isinstance(raw, Mapping):
        raise fields.error(key, "it must be an object")
    if isinstance(raw.get("full_attention"), Mapping):  # one set of parameters a kind of layer
        raw = raw["full_attention"]
    rope = Fields(raw, f"{fields.where}: {key}")
    _check_partial(fields)
    _check_partial(rope)
    theta = rope.number("rope_theta", default=theta)
    kind_key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = raw.get(kind_key, "default")
    if kind == "default":
        return Rope(theta, None)
    if kind not in SUPPORTED_KINDS:
        raise rope.error(kind_key, f"the supported kinds are {', '.join(SUPPORTED_KINDS)}")
    return Rope(theta, _scaling(rope, kind, fields))


def _scaling(rope: Fields, kind: str, fields: Fields) -> RopeScaling:
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling(kind, factor, rope.optional_integer("original_max_position_embeddings"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"it must be above low_freq_factor {low}")
        original = rope.integer("original_max_position_embeddings")
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    trained = rope.optional_integer("original_max_position_embeddings")
    return RopeScaling(
        kind,
        factor,
        trained or fields.integer("max_position_embeddings"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
    )


def _check_partial(fields: Fields) -> None:
    share = fields.get("partial_rotary_factor")
    if share not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", "rotating a part of each head is not supported")


def longest_context(written: int, scaling: RopeScaling | None, family: str) -> int:
    """Tokens of context that the scaling stands for.

    YaRN stretches the context that it names by its factor, whatever ``max_position_embeddings`` says (Qwen's
    instructions add the scaling and leave that number). Linear scaling stretches the trained context, which older
    configs write as ``max_position_embeddings``; where the trained one is written beside it, or in Gemma 3, whose
    scaling covers some layers only, the number already holds.
    """
    if scaling is None or scaling.kind == "llama3" or family.startswith("gemma"):
        return written
    if scaling.kind == "linear" and scaling.original_max_position is None:
        return int(written * scaling.factor)
    return max(written, int((scaling.original_max_position or written) * scaling.factor))
