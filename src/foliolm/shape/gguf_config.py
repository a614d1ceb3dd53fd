"""A model's shape from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foliolm.core.errors import ModelError
from foliolm.shape.fields import Fields
from foliolm.shape.model import ModelShape, MoEShape, RopeScaling
from foliolm.shape.rope import longest_context

_FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}

_REFUSED_YARN = tuple(
    f"rope.scaling.{key}" for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier")
)


def shape_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    name: str,
    weight_dtype: str,
    weight_bits: float,
    embedding_bits: float,
) -> ModelShape:
    """Read a model's shape.

    Args:
        metadata: the file's metadata by key.
        tensors: shapes by ggml's tensor name, slowest dimension first: they alone say whether the head is tied and
            which linears have a bias.
        name: the file's name, for people and for the errors' text.
        weight_dtype: name of the type that most matrix weights are stored in, lower case.
        weight_bits: average stored bits of a weight of the layers' matrices.
        embedding_bits: the same of the embedding and the output head.

    Returns:
        The shape; ``vocab_size`` counts the rows of the embedding, padding included.

    Raises:
        ModelError: a needed key is missing or senseless, or the architecture or its RoPE is not supported; the message
            names the key and the value.
    """
    where = f"{name}: the metadata"
    arch = Fields(metadata, where).text("general.architecture")
    family = _FAMILIES.get(arch)
    if family is None:
        raise ModelError(f"{where} has general.architecture {arch!r}; the supported ones are {', '.join(_FAMILIES)}")
    prefix = f"{arch}."
    fields = Fields(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}, where
    )
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{name} has no tensor token_embd.weight")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise fields.error("attention.head_count_kv", f"attention.head_count {heads} is not a multiple of it")
    head_dim = _head_dim(fields, hidden, heads)
    moe = _moe(fields, tensors)
    if moe is not None and family == "llama":
        family = "mixtral"
    scaling = _scaling(fields)
    return ModelShape(
        name=name,
        family=family,
        num_layers=fields.integer("block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        vocab_size=embedding[0],
        max_position_embeddings=longest_context(fields.integer("context_length"), scaling, family),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", default=10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=fields.optional_integer("attention.sliding_window"),
        moe=moe,
        weight_dtype=weight_dtype,
        weight_bits=weight_bits,
        embedding_bits=embedding_bits,
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    rotated = fields.optional_integer("rope.dimension_count")
    head_dim = fields.optional_integer("attention.key_length")
    if head_dim is None:
        if rotated is None and hidden % heads:
            raise fields.error(
                "attention.key_length", f"embedding_length {hidden} is not a multiple of head_count {heads}"
            )
        head_dim = rotated or hidden // heads
    if fields.integer("attention.value_length", default=head_dim) != head_dim:
        raise fields.error("attention.value_length", f"it must equal attention.key_length {head_dim}")
    if rotated not in (None, head_dim):
        raise fields.error("rope.dimension_count", f"rotating a part of each head (of {head_dim}) is not supported")
    return head_dim


def _moe(fields: Fields, tensors: Mapping[str, tuple[int, ...]]) -> MoEShape | None:
    experts = fields.integer("expert_count", default=0, least=0)
    if experts == 0:
        return None
    width = fields.integer("expert_feed_forward_length", default=fields.integer("feed_forward_length"))
    shared = fields.integer("expert_shared_feed_forward_length", default=0, least=0)
    if not shared and (gate := tensors.get("blk.0.ffn_gate_shexp.weight")) is not None:
        shared = gate[0]
    return MoEShape(
        num_experts=experts,
        experts_per_token=fields.integer("expert_used_count"),
        intermediate_size=width,
        num_shared_experts=1 if shared else 0,
        shared_intermediate_size=shared,
    )


def _scaling(fields: Fields) -> RopeScaling | None:
    """RoPE scaling. Llama 3's is not written here: its frequencies come as a tensor, ``rope_freqs.weight``."""
    kind = fields.get("rope.scaling.type")
    old = fields.optional_number("rope.scale_linear")  # before there were types
    if kind is None and old not in (None, 1.0):
        return RopeScaling("linear", float(old or 1.0))
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", "the supported kinds are none, linear and yarn")
    factor = fields.number("rope.scaling.factor", default=1.0)
    if factor == 1.0:
        return None
    if kind == "linear":
        return RopeScaling(kind, factor)
    for key in _REFUSED_YARN:
        if fields.get(key) not in (None, 1.0):
            raise fields.error(key, "only 1 is supported")
    return RopeScaling(
        kind,
        factor,
        fields.integer("rope.scaling.original_context_length", default=fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
    )
