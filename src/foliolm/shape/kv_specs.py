"""What a model's layers keep a token, on one of ``tp`` devices."""

from __future__ import annotations

from foliolm.core.errors import ConfigError
from foliolm.core.kvspec import KVSpec
from foliolm.shape.formats import KV_BITS, KV_SCALE_BYTES_PER_HEAD, kv_dtype
from foliolm.shape.model import ModelShape


def kv_heads_per_device(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """KV heads on each device: split, or repeated where there are fewer heads than devices.

    Latent attention (MLA) keeps one latent for all heads, so every device keeps all of it: 1.

    Raises:
        ConfigError: heads do not divide.
    """
    tp = tensor_parallel_size
    if tp < 1:
        raise ConfigError(f"tensor_parallel_size is {tp}; it must be at least 1")
    if shape.num_heads % tp:
        raise ConfigError(f"tensor_parallel_size {tp} does not divide num_heads {shape.num_heads} of {shape.name}")
    if shape.mla:
        return 1
    heads = shape.num_kv_heads
    if heads % tp and tp % heads:
        raise ConfigError(f"tensor_parallel_size {tp} neither divides nor is a multiple of num_kv_heads {heads}")
    return max(1, heads // tp)


def layer_kv_bytes(shape: ModelShape, cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
    """Bytes that one layer keeps a token on one device, scales included.

    GQA: ``2 · kv_heads · head_dim`` values (K and V). MLA: ``kv_lora_rank + qk_rope_head_dim`` values (the compressed
    latent and the shared RoPE key; DeepSeek-V2, section 2.1). With a scale a head a token: one for K and one for V.
    """
    heads = kv_heads_per_device(shape, tensor_parallel_size)
    name = kv_dtype(shape, cache_dtype)
    values = shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim if shape.mla else 2 * heads * shape.head_dim
    scales = (1 if shape.mla else 2 * heads) * KV_SCALE_BYTES_PER_HEAD.get(name, 0)
    return -(-int(values * KV_BITS[name]) // 8) + scales


def kv_specs(shape: ModelShape, cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> tuple[KVSpec, ...]:
    """Groups of layers that keep KV alike, on one device: ``full``, ``window`` or both, full first."""
    a_layer = layer_kv_bytes(shape, cache_dtype, tensor_parallel_size)
    windowed = num_windowed_layers(shape)
    specs = []
    if shape.num_layers > windowed:
        layers = shape.num_layers - windowed
        specs.append(KVSpec("full", layers, layers * a_layer))
    if windowed:
        specs.append(KVSpec("window", windowed, windowed * a_layer, shape.sliding_window))
    return tuple(specs)


def num_windowed_layers(shape: ModelShape) -> int:
    """How many layers look back a window only."""
    if not shape.sliding_window:
        return 0
    return len(shape.windowed_layers) or shape.num_layers
