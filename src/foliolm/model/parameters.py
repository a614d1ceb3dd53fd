"""The parameters of a model under their Hugging Face names, and where each goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foliolm.shape.model import ModelShape


@dataclass(frozen=True, slots=True)
class Part:
    """A stored parameter: rows ``start … start + shape[0]`` of a fused one.

    Attributes:
        name: as Hugging Face writes it.
        target: the fused parameter that it is a part of.
        start: its first row there.
        shape: its own shape.
    """

    name: str
    target: str
    start: int
    shape: tuple[int, ...]


def parts(shape: ModelShape, num_embeddings: int) -> list[Part]:
    """Every parameter that a model of this shape has.

    Args:
        shape: the model's.
        num_embeddings: rows of the embedding, and of the output head where there is one.
    """
    h = shape.hidden_size
    found = [
        Part("model.embed_tokens.weight", "embed", 0, (num_embeddings, h)),
        Part("model.norm.weight", "norm", 0, (h,)),
    ]
    if not shape.tie_word_embeddings:
        found.append(Part("lm_head.weight", "head", 0, (num_embeddings, h)))
    for layer in range(shape.num_layers):
        found.extend(_layer(shape, layer))
    return found


def ignorable(name: str, shape: ModelShape) -> bool:
    """Tensors that files carry although they follow from others: stored frequencies, and the copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and shape.tie_word_embeddings)


def _layer(shape: ModelShape, layer: int) -> Iterator[Part]:
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    at, to = f"model.layers.{layer}", f"{layer}"
    yield Part(f"{at}.input_layernorm.weight", f"{to}.input_norm", 0, (h,))
    yield Part(f"{at}.post_attention_layernorm.weight", f"{to}.post_norm", 0, (h,))
    start = 0
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield Part(f"{at}.self_attn.{name}_proj.weight", f"{to}.qkv", start, (rows, h))
        if shape.qkv_bias:
            yield Part(f"{at}.self_attn.{name}_proj.bias", f"{to}.qkv_bias", start, (rows,))
        start += rows
    yield Part(f"{at}.self_attn.o_proj.weight", f"{to}.o", 0, (h, q))
    if shape.o_bias:
        yield Part(f"{at}.self_attn.o_proj.bias", f"{to}.o_bias", 0, (h,))
    if shape.qk_norm:
        yield Part(f"{at}.self_attn.q_norm.weight", f"{to}.q_norm", 0, (shape.head_dim,))
        yield Part(f"{at}.self_attn.k_norm.weight", f"{to}.k_norm", 0, (shape.head_dim,))
    for index, name in enumerate(("gate", "up")):
        yield Part(f"{at}.mlp.{name}_proj.weight", f"{to}.gate_up", index * i, (i, h))
        if shape.mlp_bias:
            yield Part(f"{at}.mlp.{name}_proj.bias", f"{to}.gate_up_bias", index * i, (i,))
    yield Part(f"{at}.mlp.down_proj.weight", f"{to}.down", 0, (h, i))
    if shape.mlp_bias:
        yield Part(f"{at}.mlp.down_proj.bias", f"{to}.down_bias", 0, (h,))
