"""Which linears a LoRA adapter may touch, how they are grouped, and how many values that takes."""

from __future__ import annotations

from collections.abc import Mapping

from foliolm.shape.model import ModelShape

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
LORA_GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("lm_head",),
}
"""Modules over one input, whose outputs lie side by side: they are shrunk together, and expanded together."""
HEAD = -1
"""Stands for a layer: of the output head."""


def module_shape(shape: ModelShape, module: str) -> tuple[int, int]:
    """(outputs, inputs) of a linear."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "q_proj": (q, h),
        "k_proj": (kv, h),
        "v_proj": (kv, h),
        "o_proj": (h, q),
        "gate_proj": (i, h),
        "up_proj": (i, h),
        "down_proj": (h, i),
        "lm_head": (shape.vocab_size, h),
    }[module]


def adapter_params(shape: ModelShape, ranks: Mapping[tuple[int, str], int]) -> tuple[int, int]:
    """Values of an adapter in the layers and at the head, from its ranks by (layer, module)."""
    body = head = 0
    for (layer, module), rank in ranks.items():
        size = rank * sum(module_shape(shape, module))
        body, head = (body, head + size) if layer == HEAD else (body + size, head)
    return body, head
