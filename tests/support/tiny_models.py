"""Small random models: transformers' and ours with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foliolm.model.decoder import DecoderModel, Model
from foliolm.model.loader import load_model
from foliolm.model.native_loader import load_native
from foliolm.ops.native.build import BuildError, find_compiler
from foliolm.ops.native.library import Library, load_library
from foliolm.ops.native.target import best_target, cpu_features
from foliolm.shape.model import ModelShape, RopeScaling

VOCAB = 160


def reference(kind: str, **overrides: Any) -> Any:
    """A transformers model in float32, random but spread wide enough that tokens are not ties.

    Args:
        kind: ``llama``, ``mistral``, ``qwen2`` or ``qwen3``.
        overrides: config fields.
    """
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    if kind == "qwen3":
        sizes["head_dim"] = 16
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **overrides})
    torch.manual_seed(1234)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Random norms and biases too: ones and zeros would hide a parameter that is never used.
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model


def shape_of(model: Any, kind: str, **overrides: Any) -> ModelShape:
    """The shape of a transformers model made by ``reference``."""
    config = model.config
    rope = dict(config.rope_parameters)
    scaling = None
    if rope.get("rope_type", "default") != "default":
        scaling = RopeScaling(
            rope["rope_type"],
            rope["factor"],
            rope.get("original_max_position_embeddings"),
            low_freq_factor=rope.get("low_freq_factor", 1.0),
            high_freq_factor=rope.get("high_freq_factor", 4.0),
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            attention_factor=rope.get("attention_factor"),
            mscale=rope.get("mscale"),
            mscale_all_dim=rope.get("mscale_all_dim"),
        )
    fields: dict[str, Any] = {
        "name": f"tiny-{kind}",
        "family": kind,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "sliding_window": config.sliding_window if kind == "mistral" else None,
        "weight_dtype": "float32",
    }
    return ModelShape(**{**fields, **overrides})


def ours(model: Any, kind: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> DecoderModel:
    """The same weights in our model."""
    return load_model(shape_of(model, kind, **overrides), model.state_dict().items(), dtype=dtype)


def ours_on(backend: str, model: Any, kind: str, **overrides: Any) -> Model:
    """The same weights in float32 on ``torch``, or on a target of the native kernels (``native``: this CPU's best)."""
    if backend == "torch":
        return ours(model, kind, **overrides)
    return load_native(kernels(backend), shape_of(model, kind, **overrides), model.state_dict().items())


def kernels(target: str) -> Library:
    """A target's native kernels; skips where they cannot be built."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return load_library(best_target(cpu_features()).name if target == "native" else target)


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens, V] float32, all positions of one sequence in one pass."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def reference_greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, and by token the difference of the two highest logits; end tokens are ordinary ones."""
    tokens, gaps = list(prompt), []
    cache, fed = None, tokens
    with torch.inference_mode():
        for _ in range(count):
            out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            top = torch.topk(out.logits[0, -1].float(), 2)
            gaps.append(float(top.values[0] - top.values[1]))
            tokens.append(int(top.indices[0]))
            fed = tokens[-1:]
    return tokens[len(prompt) :], gaps
