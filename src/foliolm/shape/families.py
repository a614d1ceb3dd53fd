"""Small tensors that a config.json does not mention, because the family's code has them always."""

from __future__ import annotations

from dataclasses import replace

from foliolm.shape.model import ModelShape


def with_family_traits(shape: ModelShape) -> ModelShape:
    """Fill in what ``shape.family`` implies, so that parameter counts come out exact.

    Gemma 2 and 3 norm after attention and MLP too; gpt-oss has attention sinks and biases in router and experts;
    DeepSeek-V3's router has a score correction an expert; Qwen2-MoE gates its shared expert.
    """
    if shape.family.startswith(("gemma2", "gemma3")):
        shape = replace(shape, norms_per_layer=4)
    if shape.family == "gpt_oss":
        shape = replace(shape, attention_sinks=True)
    if shape.moe is None:
        return shape
    moe = replace(
        shape.moe,
        router_bias=shape.family in ("gpt_oss", "deepseek_v3"),
        expert_bias=shape.family == "gpt_oss",
        shared_gate=shape.family == "qwen2_moe",
    )
    return replace(shape, moe=moe)
