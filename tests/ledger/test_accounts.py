"""Bytes and FLOPs against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import (
    account,
    all_reduce_bytes,
    attention_pairs,
    blocks_of,
    distinct_experts,
    knee_batch,
    kv_bytes_of_context,
    linear_flops,
    lora_params,
    read_per_output_token,
    ridge_batch,
    weight_bytes_per_step,
    weight_intensity,
)
from foliolm.shape.inventory import total_params
from foliolm.shape.presets import model_names, model_preset

QWEN = account(model_preset("qwen3-8b").shape)
MIXTRAL = account(model_preset("mixtral-8x7b-v0.1").shape)


@pytest.mark.parametrize("name", model_names())
def test_resident_bytes_in_16_bits_are_twice_the_parameters(name):
    shape = model_preset(name).shape
    assert account(shape, "bfloat16").resident_bytes == pytest.approx(2 * total_params(shape), rel=1e-12)


@pytest.mark.parametrize("name", model_names())
def test_a_decode_step_reads_all_matrices_but_the_looked_up_embedding(name):
    shape = model_preset(name).shape
    model = account(shape, "bfloat16")
    embedding = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    everything = weight_bytes_per_step(model, 10**9)  # so many tokens reach every expert
    assert everything == pytest.approx(2 * (total_params(shape) - embedding), rel=1e-12)
    assert weight_bytes_per_step(model, 10**9, sampled=False) == pytest.approx(everything - model.head_bytes)


def test_the_size_of_a_quantised_file():
    # SmolLM2-135M as GGUF: matrices Q4_1, embedding (tied) Q8_0, norms float32; the file has 98,362,432 bytes, of
    # which the vocabulary and other metadata take a few per cent.
    shape = replace(model_preset("smollm2-135m").shape, weight_dtype="q4_1", weight_bits=5.0, embedding_bits=8.5)
    assert 0.97 * 98_362_432 < account(shape).resident_bytes < 98_362_432


def test_distinct_experts_are_what_random_routing_reaches():
    random = Random(1)
    reached = 0
    for _ in range(400):
        reached += len({expert for _ in range(20) for expert in random.sample(range(64), 4)})
    assert distinct_experts(64, 4, 20) == pytest.approx(reached / 400, rel=0.01)
    assert distinct_experts(64, 4, 1) == pytest.approx(4)
    assert distinct_experts(64, 4, 0) == 0
    assert distinct_experts(8, 2, 10**6) == 8


def test_a_batch_of_one_reads_the_active_experts_only():
    shape = model_preset("mixtral-8x7b-v0.1").shape
    assert weight_bytes_per_step(MIXTRAL, 1) == pytest.approx(2 * 12748853248)
    assert shape.moe is not None


def test_windowed_layers_keep_at_most_their_window():
    shape = model_preset("gemma-3-27b-it").shape
    model = account(shape)
    a_layer = 2 * 16 * 128 * 2
    assert kv_bytes_of_context(model, 131072) == 10 * a_layer * 131072 + 52 * a_layer * 1024
    assert kv_bytes_of_context(model, 500) == 62 * a_layer * 500


def test_blocks_of_a_window_may_start_anywhere():
    window = account(model_preset("gpt-oss-20b").shape).kv[1]
    most = max(len({token // 16 for token in range(end - 128 + 1, end + 1)}) for end in range(1000, 1100))
    assert blocks_of(window, 100_000, 16) == most == 9
    assert blocks_of(window, 17, 16) == 2


@pytest.mark.parametrize("model", [QWEN, MIXTRAL], ids=["dense", "moe"])
@pytest.mark.parametrize("context", [64, 2048, 30000])
def test_the_knee_is_the_first_batch_past_it(model, context):
    knee = knee_batch(model, context)
    assert knee is not None
    past = [weight_bytes_per_step(model, b) / b <= kv_bytes_of_context(model, context) for b in range(1, knee + 50)]
    assert past.index(True) + 1 == knee
    assert all(past[knee - 1 :])


def test_no_context_has_no_knee():
    assert knee_batch(QWEN, 0) is None


def test_the_read_account_adds_up():
    step = weight_bytes_per_step(QWEN, 7) + 7 * kv_bytes_of_context(QWEN, 333)
    assert 7 * read_per_output_token(QWEN, 7, 333) == pytest.approx(step)


def test_tensor_parallelism_splits_what_can_be_split():
    shape = model_preset("llama-3.1-70b").shape
    whole, eighth = account(shape), account(shape, tensor_parallel_size=8)
    norms = 2 * (2 * 80 + 1) * 8192
    assert eighth.resident_bytes == pytest.approx((whole.resident_bytes - norms) / 8 + norms)
    assert eighth.kv_bytes_per_token == whole.kv_bytes_per_token / 8 == 40960
    sixteenth = account(shape, tensor_parallel_size=16)  # 8 KV heads: repeated
    assert sixteenth.kv_bytes_per_token == 40960
    assert sixteenth.resident_bytes > whole.resident_bytes / 16


def test_a_ring_all_reduce_sends_twice_almost_everything():
    eighth = account(model_preset("llama-3.1-70b").shape, tensor_parallel_size=8)
    assert all_reduce_bytes(eighth, 10) == 2 * 80 * 10 * 8192 * 2 * 2 * 7 / 8
    assert all_reduce_bytes(QWEN, 10) == 0


def test_attention_pairs_by_counting():
    assert attention_pairs(100, 50) == 100 * 50 + 5000
    for new, cached, window in [(100, 50, 80), (100, 200, 80), (30, 10, 80), (500, 0, 1)]:
        counted = sum(min(cached + i + 0.5, window) for i in range(new))
        assert attention_pairs(new, cached, window) == pytest.approx(counted, rel=0.02), (new, cached, window)
    assert attention_pairs(10, 5, 15) == attention_pairs(10, 5)


def test_intensity_is_two_b_over_the_bytes_of_a_weight():
    assert weight_intensity(QWEN, 16) == 16
    assert weight_intensity(account(model_preset("qwen3-8b").shape, "float32"), 16) == 8
    assert weight_intensity(MIXTRAL, 16) < 8  # the batch reads more experts than each token uses


def test_the_ridge_is_flops_over_bandwidth_for_a_dense_16_bit_model():
    assert ridge_batch(QWEN, 3350e9, 989.4e12) == 296  # 295.3 rounded up
    assert ridge_batch(QWEN, 1e9, 1e30) is None


def test_the_head_is_computed_for_sampled_rows_only():
    assert linear_flops(QWEN, 2048, 0) == 2 * 6946075648 * 2048
    assert linear_flops(QWEN, 0, 3) == 2 * 151936 * 4096 * 3


def test_mla_computes_decode_in_the_latent_space():
    model = account(model_preset("deepseek-v3").shape)
    assert model.attention_flops_per_pair == 2 * 128 * (192 + 128)
    assert model.decode_flops_per_pair == 2 * 128 * (576 + 512)
    assert model.kv_bytes_per_token == 61 * 576 * 2


def test_lora_counts_every_target_of_every_layer():
    shape = model_preset("qwen3-8b").shape
    assert lora_params(shape, 16, ("q_proj", "v_proj")) * 2 == 15335424
    assert lora_params(shape, 1, ("down_proj",)) == 36 * (12288 + 4096)
    assert lora_params(shape, 16, ("q_proj", "q_proj", "v_proj")) * 2 == 15335424
    moe = model_preset("mixtral-8x7b-v0.1").shape
    assert lora_params(moe, 1, ("up_proj",)) == 32 * 8 * (4096 + 14336)
    with pytest.raises(ConfigError, match="no linear 'query'; it has down_proj, gate_proj, k_proj"):
        lora_params(shape, 16, ("query",))
    with pytest.raises(ConfigError, match="rank is 4097; it must be from 1 to the hidden size, 4096"):
        lora_params(shape, 4097, ("q_proj",))
    with pytest.raises(ConfigError, match="targets is empty"):
        lora_params(shape, 16, ())
