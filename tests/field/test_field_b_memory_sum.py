"""Reports of memory that did not add up: the planner's sum says it before the start."""

from __future__ import annotations

import json

import pytest

from support.plan_cli import plan

GIB = 2**30


def test_b1_a_context_larger_than_the_pool_names_pool_and_largest(tmp_path):
    # A pool of 64 blocks of 16 (1,024 tokens of 4-layer KV), and a context of 4,096 asked for.
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
    }
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config))
    k = 2 * 4 * 2 * 64 * 2
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"id": "c", "memory_gb": 1, "bandwidth_gbps": 100, "bf16_tflops_dense": 10}))
    words = ("capacity", "--model", model, "--device", card, "--activations-gib", 0, "--gpu-memory-utilization", 0.9)
    weights = plan(*words, "--context", 1, "--other-gib", 0)["weights_bytes"]
    other = int(GIB * 0.9) - weights - 1024 * k
    numbers = plan(*words, "--context", 4096, "--other-gib", repr(other / GIB))
    assert (numbers["tokens"], numbers["sequences"]) == (1024, 0)
    assert numbers["largest_max_model_len"] == 1024
    assert "Not one sequence of 4,096 tokens fits: the largest max_model_len is 1,024" in numbers["verdict"]


def test_b8_the_sum_of_a_70b_on_two_cards():
    words = ("capacity", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--tensor-parallel-size", 2)
    numbers = plan(*words, "--context", 30816)
    assert numbers["weights_bytes"] / GIB == pytest.approx(65.71, rel=0.002)
    assert numbers["kv_bytes_per_token"] == 163840
    assert numbers["kv_bytes_per_token"] * 30816 / GIB == pytest.approx(4.702, rel=0.002)
    # A larger prefill takes its activations from the pool.
    larger = plan(*words, "--context", 30816, "--max-num-batched-tokens", 16384)
    assert larger["activations_bytes"] > numbers["activations_bytes"]
    gained = larger["activations_bytes"] - numbers["activations_bytes"]
    assert numbers["kv_pool_bytes"] - larger["kv_pool_bytes"] == gained


def test_b10_every_sum_uses_the_kv_type_in_force():
    words = ("read", "--model", "qwen3-32b", "--context", 131072, "--batch", 1)  # 64 layers, 8 KV heads of 128
    sixteen, eight = plan(*words), plan(*words, "--kv-cache-dtype", "fp8")
    assert (sixteen["kv_bytes_per_token"], eight["kv_bytes_per_token"]) == (262144, 131072)
    assert (sixteen["floor_bytes"] / GIB, eight["floor_bytes"] / GIB) == (32, 16)
    scaled = plan(*words, "--kv-cache-dtype", "int8")  # a float32 scale a head and token for K and V each
    assert scaled["kv_bytes_per_token"] == 64 * 2 * 8 * (128 + 4)
    capacity = ("capacity", "--model", "qwen3-32b", "--device", "h100-sxm", "--context", 8192)
    pools = [plan(*capacity, "--kv-cache-dtype", dtype) for dtype in ("bfloat16", "fp8")]
    assert pools[0]["kv_pool_bytes"] == pools[1]["kv_pool_bytes"]
    assert pools[1]["tokens"] == pytest.approx(2 * pools[0]["tokens"], abs=16)
