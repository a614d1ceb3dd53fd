"""A model's shape from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from foliolm.core.errors import ModelError
from foliolm.shape.fields import Fields
from foliolm.shape.model import MLAShape, ModelShape, MoEShape
from foliolm.shape.rope import longest_context, read_rope

RUNNABLE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_DTYPE_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read a model's shape.

    Args:
        config: the parsed ``config.json``; the text part is taken of a model that also sees images.
        name: for people, and for the errors' text.

    Returns:
        The shape. Families outside ``RUNNABLE_FAMILIES`` can be planned with, not run.

    Raises:
        ModelError: a needed field is missing or senseless, the family is unknown, or its RoPE is of a kind that is not
            supported; the message names the field and the value.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        config = {**outer, **inner}
    fields = Fields(config, f"{name}: config.json")
    family = fields.text("model_type")
    reader = _FAMILIES.get(family)
    if reader is None:
        known = ", ".join(_FAMILIES)
        raise ModelError(f"{name}: config.json has model_type {family!r}; the known families are {known}")
    return reader(fields, name, family)


def _dense(
    fields: Fields,
    name: str,
    family: str,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    tied_by_default: bool = False,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    window: int | None = None,
    windowed_layers: tuple[int, ...] = (),
    moe: MoEShape | None = None,
    mla: MLAShape | None = None,
    intermediate_size: int | None = None,
) -> ModelShape:
    """What every family has in common; the keyword arguments are what sets one apart."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    if head_dim is None:
        head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise fields.error(
                "num_attention_heads", f"hidden_size {hidden} is not a multiple of it and there is no head_dim"
            )
        head_dim = hidden // heads
    kv_heads = num_kv_heads or fields.integer("num_key_value_heads", default=heads)
    if mla is None and heads % kv_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads {heads} is not a multiple of it")
    rope = read_rope(fields)
    dtype, bits = _stored_type(fields)
    return ModelShape(
        name=name,
        family=family,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size or fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=longest_context(fields.integer("max_position_embeddings"), rope.scaling, family),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=tied_by_default),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=window,
        windowed_layers=windowed_layers,
        moe=moe,
        mla=mla,
        weight_dtype=dtype,
        weight_bits=bits,
    )


def _llama(fields: Fields, name: str, family: str) -> ModelShape:
    _only_silu(fields)
    bias = fields.flag("attention_bias", default=False)
    return _dense(fields, name, family, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", default=False))


def _mistral(fields: Fields, name: str, family: str) -> ModelShape:
    _only_silu(fields)
    fields.integer("num_key_value_heads")  # has another default than num_attention_heads there: must be written
    return _dense(fields, name, family, window=fields.optional_integer("sliding_window"))


def _qwen2(fields: Fields, name: str, family: str) -> ModelShape:
    _only_silu(fields)
    fields.integer("num_key_value_heads")
    window, layers = _qwen_window(fields)
    return _dense(fields, name, family, qkv_bias=True, window=window, windowed_layers=layers)


def _qwen3(fields: Fields, name: str, family: str) -> ModelShape:
    _only_silu(fields)
    fields.integer("num_key_value_heads")
    window, layers = _qwen_window(fields)
    bias = fields.flag("attention_bias", default=False)
    return _dense(
        fields,
        name,
        family,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        head_dim=fields.integer("head_dim", default=128),
        window=window,
        windowed_layers=layers,
    )


def _mixtral(fields: Fields, name: str, family: str) -> ModelShape:
    moe = MoEShape(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
    )
    return _dense(fields, name, family, window=fields.optional_integer("sliding_window"), moe=moe)


def _qwen_moe(fields: Fields, name: str, family: str) -> ModelShape:
    if fields.get("mlp_only_layers"):
        raise fields.error("mlp_only_layers", "a list of dense layers is not supported; only an empty one is")
    shared = fields.integer("shared_expert_intermediate_size", default=0, least=0)
    moe = MoEShape(
        num_experts=fields.integer("num_local_experts" if "num_local_experts" in fields.values else "num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_shared_experts=1 if shared else 0,
        shared_intermediate_size=shared,
        layer_step=fields.integer("decoder_sparse_step", default=1),
    )
    window, layers = _qwen_window(fields)
    third = family == "qwen3_moe"
    bias = fields.flag("attention_bias", default=False) if third else True
    return _dense(
        fields,
        name,
        family,
        qkv_bias=bias,
        o_bias=bias and third,
        qk_norm=third,
        window=window,
        windowed_layers=layers,
        moe=moe,
    )


def _deepseek(fields: Fields, name: str, family: str) -> ModelShape:
    mla = MLAShape(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.optional_integer("q_lora_rank"),
    )
    moe = None
    if fields.get("n_routed_experts") is not None:
        width = fields.integer("moe_intermediate_size")
        shared = fields.integer("n_shared_experts", default=0, least=0)
        moe = MoEShape(
            num_experts=fields.integer("n_routed_experts"),
            experts_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=width,
            num_shared_experts=shared,
            shared_intermediate_size=shared * width,
            first_dense_layers=fields.integer("first_k_dense_replace", default=0, least=0),
            layer_step=fields.integer("moe_layer_freq", default=1),
        )
    return _dense(fields, name, family, head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim, moe=moe, mla=mla)


def _gpt_oss(fields: Fields, name: str, family: str) -> ModelShape:
    moe = MoEShape(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
    )
    window = fields.optional_integer("sliding_window")
    layers = _sliding_layers(fields, lambda layer: layer % 2 == 0) if window else ()
    bias = fields.flag("attention_bias", default=True)
    return _dense(
        fields, name, family, qkv_bias=bias, o_bias=bias, mlp_bias=True, window=window, windowed_layers=layers, moe=moe
    )


def _gemma(fields: Fields, name: str, family: str) -> ModelShape:
    window = fields.optional_integer("sliding_window")
    step = fields.integer("sliding_window_pattern", default=6) if family.startswith("gemma3") else 2
    layers = _sliding_layers(fields, lambda layer: (layer + 1) % step != 0) if window else ()
    return _dense(
        fields,
        name,
        family,
        qk_norm=family.startswith("gemma3"),
        tied_by_default=True,
        head_dim=fields.integer("head_dim", default=256),
        window=window,
        windowed_layers=layers,
    )


_FAMILIES: dict[str, Callable[[Fields, str, str], ModelShape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma3_text": _gemma,
}


def _only_silu(fields: Fields) -> None:
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise fields.error("hidden_act", "only silu is supported")


def _qwen_window(fields: Fields) -> tuple[int | None, tuple[int, ...]]:
    """Qwen writes a window into every config, and a flag beside it that says whether it is used at all."""
    if not fields.flag("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return None, ()
    window = fields.integer("sliding_window")
    first = fields.integer("max_window_layers", default=28, least=0)
    layers = _sliding_layers(fields, lambda layer: layer >= first)
    return (window, layers) if layers else (None, ())


def _sliding_layers(fields: Fields, by_rule: Callable[[int], bool]) -> tuple[int, ...]:
    """The layers that look back a window only: from ``layer_types`` where it is written, else by the family's rule."""
    count = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(layer for layer in range(count) if by_rule(layer))
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.error("layer_types", f"it must be a list of num_hidden_layers = {count} names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"{kind!r} is not supported; full_attention and sliding_attention are")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _stored_type(fields: Fields) -> tuple[str, float]:
    """Name of the stored weights' type, and bits a weight with the scales."""
    quantised = fields.get("quantization_config")
    if isinstance(quantised, Mapping):
        return _quantised_type(Fields(quantised, f"{fields.where}: quantization_config"))
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPE_BITS:
        raise fields.error("dtype", f"it must be one of {', '.join(_DTYPE_BITS)}")
    return dtype, _DTYPE_BITS[dtype]


def _quantised_type(fields: Fields) -> tuple[str, float]:
    method = fields.text("quant_method")
    if method == "fp8":
        return "fp8", 8.0
    if method == "mxfp4":
        return "mxfp4", 4.25  # 32 four-bit numbers share an eight-bit scale
    if method in ("gptq", "awq"):
        bits = fields.integer("bits")
        group = fields.integer("group_size", default=128, least=-1)
        scales = (
            (16 + bits) / group if group > 0 else 0.0
        )  # a float16 scale and a zero point of the same width as a weight
        return method, bits + scales
    raise fields.error("quant_method", "it must be one of fp8, mxfp4, gptq, awq")
