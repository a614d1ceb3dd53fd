"""Bits a weight and a KV element, scales included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foliolm.core.errors import ConfigError
from foliolm.shape.formats import GGUF_BITS, kv_dtype, weight_format
from foliolm.shape.inventory import Part
from foliolm.shape.kv_specs import kv_heads_per_device, kv_specs, layer_kv_bytes
from foliolm.shape.presets import model_preset

QWEN = model_preset("qwen3-8b").shape
SMOL = model_preset("smollm2-135m").shape


def test_gguf_bits_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for name, bits in GGUF_BITS.items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert bits == size * 8 / values, name


def test_formats_say_what_they_leave_in_16_bits():
    fp8 = weight_format(QWEN, "fp8")
    assert (fp8.bits(Part.HEAD), fp8.bits(Part.NORM), fp8.compute) == (16, 16, "fp8")
    assert 8 < fp8.bits(Part.MLP) < 8.01
    assert weight_format(QWEN, "awq").bits(Part.ATTENTION) == 4.15625
    mxfp4 = weight_format(model_preset("gpt-oss-20b").shape)
    assert (mxfp4.bits(Part.EXPERT), mxfp4.bits(Part.ATTENTION), mxfp4.bits(Part.EMBEDDING)) == (4.25, 16, 16)


def test_a_stored_mixture_keeps_its_own_averages():
    shape = replace(SMOL, weight_dtype="q4_k_m", weight_bits=4.9, embedding_bits=6.5)
    stored = weight_format(shape)
    assert (stored.bits(Part.MLP), stored.bits(Part.EMBEDDING), stored.bits(Part.NORM)) == (4.9, 6.5, 32)
    assert weight_format(shape, "bf16").bits(Part.MLP) == 16
    four = weight_format(replace(QWEN, weight_dtype="awq_4bit", weight_bits=4.16))
    assert (four.bits(Part.MLP), four.bits(Part.EMBEDDING)) == (4.16, 16)


def test_unknown_formats_suggest_the_nearest():
    with pytest.raises(ConfigError, match="did you mean q4_k"):
        weight_format(QWEN, "q4_kk")
    with pytest.raises(ConfigError, match="kv_cache_dtype 'fp9' is not known; did you mean fp8"):
        kv_dtype(QWEN, "fp9")


def test_kv_element_types():
    assert layer_kv_bytes(QWEN) == 2 * 8 * 128 * 2
    assert layer_kv_bytes(QWEN, "fp8") * 2 == layer_kv_bytes(QWEN)
    assert layer_kv_bytes(QWEN, "int8") == 2 * 8 * (128 + 4)  # and a float32 scale a head, for K and for V
    assert layer_kv_bytes(QWEN, "q8_0") == 2 * 8 * 128 * 34 // 32
    assert kv_dtype(replace(QWEN, weight_dtype="float32")) == "float32"
    assert kv_dtype(replace(QWEN, weight_dtype="q4_1")) == "bfloat16"


def test_kv_heads_are_split_or_repeated():
    assert [kv_heads_per_device(QWEN, tp) for tp in (1, 2, 4, 8, 16, 32)] == [8, 4, 2, 1, 1, 1]
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide num_heads 32"):
        kv_heads_per_device(QWEN, 3)
    six = replace(QWEN, num_heads=24, num_kv_heads=6)
    with pytest.raises(ConfigError, match="neither divides nor is a multiple of num_kv_heads 6"):
        kv_heads_per_device(six, 4)
    deepseek = model_preset("deepseek-v3").shape
    assert layer_kv_bytes(deepseek, "auto", 8) == layer_kv_bytes(deepseek) == (512 + 64) * 2


def test_windowed_layers_are_a_group_of_their_own():
    full, window = kv_specs(model_preset("gpt-oss-20b").shape)
    assert (full.num_layers, full.window, window.num_layers, window.window) == (12, None, 12, 128)
    assert full.bytes_per_token == window.bytes_per_token == 12 * 2 * 8 * 64 * 2
    every_layer = replace(QWEN, sliding_window=4096)
    (only,) = kv_specs(every_layer)
    assert (only.num_layers, only.window) == (36, 4096)
