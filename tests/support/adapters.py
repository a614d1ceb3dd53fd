"""LoRA adapters on disk as PEFT writes them, and models with one merged into the weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foliolm.shape.lora import module_shape
from foliolm.shape.model import ModelShape

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.2,
    ranks: Mapping[str, int] | None = None,
    **settings: Any,
) -> Path:
    """A random adapter of a transformers model or a shape, strong enough to change its answers.

    Args:
        folder: to write.
        model: gives the sizes, by its linears.
        targets: modules, ``lm_head`` among them or not.
        rank, alpha: of all modules but those of ``ranks``.
        seed: of the values.
        size: deviation of the values.
        ranks: by module, as PEFT's rank_pattern.
        settings: more of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (n, k) in _linears(model):
        kind = name.rpartition(".")[2]
        if kind not in targets:
            continue
        r = (ranks or {}).get(kind, rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(r, k, generator=generator) * size
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n, r, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}),
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _linears(model: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, [out, in]) of a transformers model's modules with a matrix, or of a shape's linears."""
    if not isinstance(model, ModelShape):
        for name, module in model.named_modules():
            if getattr(module, "weight", None) is not None and module.weight.dim() == 2:
                yield name, tuple(module.weight.shape)
        return
    for layer in range(model.num_layers):
        for module in ALL:
            block = "self_attn" if module in ALL[:4] else "mlp"
            yield f"model.layers.{layer}.{block}.{module}", module_shape(model, module)
    yield "lm_head", module_shape(model, "lm_head")


def merged(model: Any, folder: Path) -> Any:
    """A copy of a transformers model with an adapter's products added to its weights, by arithmetic of this file."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in twin.named_modules():
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if a is None:
                continue
            b = tensors[f"base_model.model.{name}.lora_B.weight"]
            alpha = config.get("alpha_pattern", {}).get(name.rpartition(".")[2], config["lora_alpha"])
            scale = alpha / math.sqrt(len(a)) if config.get("use_rslora") else alpha / len(a)
            module.weight += (scale * b.double() @ a.double()).float()
    return twin
