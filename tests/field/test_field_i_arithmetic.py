"""Sums that people got wrong by hand (or by a rule of thumb), answered by ``foliolm plan``.

Each test is one reported case: the command must give the checked numbers, from shapes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.plan_cli import plan

GIB = 2**30


def config(folder: Path, **fields: object) -> Path:
    """A config.json of a Llama-like model that has no preset."""
    base = {
        "model_type": "llama",
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    path = folder / "config.json"
    path.write_text(json.dumps({**base, **fields}))
    return path


def device(folder: Path, **fields: object) -> Path:
    """A device that has no preset."""
    path = folder / "device.json"
    base = {"id": "card", "memory_gb": 80, "bandwidth_gbps": 2000, "bf16_tflops_dense": 300}
    path.write_text(json.dumps({**base, **fields}))
    return path


def kv_bytes(model: object, context: int, *words: object) -> int:
    """What one sequence of ``context`` tokens keeps."""
    return int(plan("read", "--model", model, "--context", context, "--batch", 1, *words)["floor_bytes"])


def test_i2_kv_from_kv_heads_not_from_the_hidden_size():
    numbers = plan("read", "--model", "qwen2.5-7b-instruct", "--context", 3072, "--batch", 50)
    assert numbers["kv_bytes_per_token"] == 57344
    assert numbers["floor_bytes"] / GIB == pytest.approx(0.1641, rel=0.001)
    assert numbers["rows"][0]["kv_resident_bytes"] / GIB == pytest.approx(8.203, rel=0.001)


def test_i3_four_bit_weights_do_not_speed_prefill_up(tmp_path):
    card = device(tmp_path, memory_gb=48, bf16_tflops_dense=154.8)
    words = ("step", "--model", "llama-3.1-70b", "--device", card, "--prefill", "16000:0")
    numbers = plan(*words, "--quantization", "awq")
    assert numbers["linear_flops"] == pytest.approx(2.190e15, rel=0.001)
    assert numbers["attention_flops"] == pytest.approx(335.5e12, rel=0.001)
    seconds = (numbers["linear_flops"] + numbers["attention_flops"]) / 154.8e12
    assert seconds == pytest.approx(16.32, rel=0.002)
    assert numbers["total_s"] > seconds  # at less than the peak, never faster
    assert numbers["binds"] == "compute"
    assert "only fewer tokens" in numbers["verdict"]
    assert numbers["matmul_s"] == pytest.approx(plan(*words)["matmul_s"])  # the same in 16 bits


def test_i4_threads_do_not_raise_the_bandwidth(tmp_path):
    slow = device(tmp_path, memory_gb=64, bandwidth_gbps=40, bf16_tflops_dense=1, kind="cpu")
    for dtype, expected in (("float32", 1.245), ("bfloat16", 2.491)):
        words = ("--model", "llama-3.1-8b", "--device", slow, "--quantization", dtype)
        # The case counts every stored weight; the embedding is only looked up, so a little more is possible.
        stored = plan("capacity", *words, "--context", 1)["weights_bytes"]
        assert 40e9 / stored == pytest.approx(expected, rel=0.003)
        numbers = plan("read", *words, "--context", 0, "--batch", 1)
        assert expected < 1 / numbers["rows"][0]["read_s"] < 1.08 * expected
    desktop = plan("read", "--model", "llama-3.1-8b", "--device", "cpu-desktop-ddr5", "--context", 0, "--batch", 1)
    assert desktop["rows"][0]["read_s"] == pytest.approx(desktop["weight_bytes_per_step"] / (5600e6 * 8 * 2))


def test_i6_users_of_a_13b_on_one_card(tmp_path):
    model = config(
        tmp_path,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        intermediate_size=13824,
        torch_dtype="float16",
    )
    card = device(tmp_path, memory_gb=79.15)
    words = ("capacity", "--model", model, "--device", card, "--activations-gib", 0, "--other-gib", 2)
    numbers = plan(*words, "--context", 4096, "--sequences", 100, "--block-size", 1)
    assert numbers["kv_bytes_per_token"] == 819200
    assert numbers["weights_bytes"] / GIB == pytest.approx(24.24, rel=0.002)
    assert numbers["tokens"] == pytest.approx(58971, rel=0.003)
    assert numbers["tokens"] / 4096 == pytest.approx(14.4, rel=0.003)
    assert kv_bytes(model, 100 * 4096) / GIB == 312.5
    # The case shares 409,600 tokens out over cards to the token: 7. Whole contexts do not split, 14 fit a card: 8.
    assert -(-100 * 4096 // numbers["tokens"]) == 7
    assert (numbers["sequences"], numbers["groups_needed"]) == (14, 8)
    assert plan(*words, "--context", 1000, "--sequences", 100)["groups_needed"] == 2


def test_i10_two_small_groups_lose_a_copy_of_the_weights():
    words = ("capacity", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--context", 32000)
    words = (*words, "--block-size", 1, "--activations-gib", 0)
    eight = plan(*words, "--tensor-parallel-size", 8)
    four = plan(*words, "--tensor-parallel-size", 4)
    lost = eight["tokens"] - 2 * four["tokens"]
    # Weights and KV heads are split alike, so the gap is one copy of the weights in tokens (norms are kept whole).
    weights, k = 2 * 70553706496, 327680
    assert lost == pytest.approx(weights / k, rel=0.001)
    assert (eight["kv_bytes_per_token"], four["kv_bytes_per_token"]) == (k // 8, k // 4)


def test_i12_a_70b_fits_eight_small_cards_but_not_at_full_utilisation(tmp_path):
    model = config(
        tmp_path,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    )
    card = device(tmp_path, memory_gb=31.7, peer_link_gbps_one_way=32)
    words = ("capacity", "--model", model, "--device", card, "--tensor-parallel-size", 8, "--context", 1024)
    words = (*words, "--activations-gib", 0, "--other-gib", 1.5)
    numbers = plan(*words)
    assert numbers["weights_bytes"] == pytest.approx(68976648192 * 2 / 8, rel=0.001)
    assert numbers["kv_bytes_per_token"] == 40960
    assert numbers["tokens"] == pytest.approx(287572, rel=0.003)
    full = plan(*words, "--gpu-memory-utilization", 1.0)
    assert "driver context, communication buffers and fragmentation" in full["verdict"]


def test_i13_a_published_table_with_a_doubled_row():
    for model, tokens, gib in (
        ("llama-3.1-8b", 1024, 0.125),
        ("llama-3.1-8b", 128000, 15.625),
        ("llama-3.1-70b", 1024, 0.3125),
        ("llama-3.1-405b", 1024, 0.4922),
        ("llama-3.1-405b", 128000, 61.52),
    ):
        assert kv_bytes(model, tokens) / GIB == pytest.approx(gib, rel=0.001), (model, tokens)


def test_i14_windows_explicit_head_sizes_and_latents():
    assert kv_bytes("gemma-3-27b-it", 131072) / GIB == pytest.approx(10.406, rel=0.001)
    assert kv_bytes("qwen3-0.6b", 40960) / GIB == 4.375
    assert kv_bytes("deepseek-v3", 163840) / GIB == pytest.approx(10.72, rel=0.001)
    assert kv_bytes("qwen3-4b", 32768) / GIB == 4.5
    assert kv_bytes("qwen3-4b", 262144) / GIB == 36


def test_i16_how_many_prompt_tokens_may_queue():
    words = ("chunk", "--prefill-rate", 10000, "--prompt", 2000, "--chunk", 2048, "--ttft-target-s", 2)
    numbers = plan(*words)
    assert numbers["queue_token_cap"] == 20000
    assert "at most 20,000 prompt tokens may queue" in numbers["verdict"]


def test_i17_a_user_count_without_lengths_is_meaningless(tmp_path):
    model = config(
        tmp_path,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        intermediate_size=13696,
        vocab_size=152064,
    )
    card = device(tmp_path, memory_gb=23.6, peer_link_gbps_one_way=32)
    words = ("capacity", "--model", model, "--device", card, "--tensor-parallel-size", 8)
    words = (*words, "--activations-gib", 0, "--other-gib", 1.5, "--block-size", 1)
    numbers = plan(*words, "--context", 2048)
    assert numbers["kv_bytes_per_token"] == 102400
    assert numbers["tokens"] == pytest.approx(172394, rel=0.003)
    assert numbers["tokens"] / 2048 == pytest.approx(84.2, rel=0.005)
    assert plan(*words, "--context", 700)["tokens"] / 700 == pytest.approx(246, rel=0.005)
    assert numbers["sequences"] == 84
    curve = {point["context"]: point["sequences"] for point in numbers["curve"]}
    assert curve[8192] == 21
    assert list(curve.values()) == sorted(curve.values(), reverse=True)


def test_i20_grouped_heads_keep_eight_times_less(tmp_path):
    assert kv_bytes("llama-3.1-70b", 3000) / 1e9 == pytest.approx(0.983, rel=0.001)
    all_heads = config(
        tmp_path,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=64,
        intermediate_size=28672,
    )
    assert kv_bytes(all_heads, 3000) / 1e9 == pytest.approx(7.864, rel=0.001)
    card = device(tmp_path, memory_gb=80e9 / GIB, peer_link_gbps_one_way=450)
    numbers = plan(
        *("capacity", "--model", "llama-3.1-70b", "--device", card, "--quantization", "fp8"),
        *("--tensor-parallel-size", 4, "--context", 3000, "--activations-gib", 0, "--other-gib", 2e9 / GIB),
        *("--max-num-seqs", 128),
    )
    by_memory = numbers["kv_pool_bytes"] // (numbers["kv_bytes_per_token"] * 3008)
    assert by_memory == pytest.approx(213, rel=0.02)  # the case takes embedding and head as 8-bit too
    assert (numbers["sequences"], numbers["binds"]) == (128, "sequences")


def test_i21_whole_blocks_and_the_sequence_cap(tmp_path):
    # A pool of 2,360 blocks of 16: 4.61 contexts of 8,192.
    pool = 2360 * 16 * 131072
    other = 0.9 * 80 * GIB - 16060522496 - pool
    words = ("capacity", "--model", "llama-3.1-8b", "--device", device(tmp_path), "--activations-gib", 0)
    words = (*words, "--other-gib", repr((other - 1e6) / GIB))
    numbers = plan(*words, "--context", 800)
    assert numbers["blocks"] == 2360 == int(4.61 * 8192 // 16)
    assert (numbers["sequences"], numbers["binds"]) == (47, "kv")
    capped = plan(*words, "--context", 100, "--max-num-seqs", 256)
    assert (capped["sequences"], capped["binds"]) == (256, "sequences")


def test_i22_fixed_slots_against_a_paged_pool():
    fixed = plan("paging", "--lengths", "1500,1500,1500,1500", "--max-len", 4096, "--block-size", 16)
    assert fixed["reserved"]["allocated_tokens"] == 16384
    assert fixed["paged"]["allocated_tokens"] == 6016
    assert "2.72 times as many" in fixed["verdict"]


def test_a2_twice_the_batch_is_more_throughput_and_a_longer_gap():
    rows = plan("read", "--model", "qwen3-8b", "--device", "h100-sxm", "--batch", "16,32")["rows"]
    slower = rows[1]["predicted_s"] / rows[0]["predicted_s"]
    assert 1 < slower < 1.5
    assert 1 < rows[1]["throughput_gain"] < 2


def test_a5_chunking_does_not_speed_an_offline_batch_up():
    numbers = plan(
        *("chunk", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--tensor-parallel-size", 8),
        *("--prompt", 40000, "--chunk", 4096),
    )
    assert 0 < numbers["ttft_cost_s"] / numbers["ttft_whole_s"] < 0.06
    step = plan(
        *("step", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--tensor-parallel-size", 8),
        *("--prefill", "4096:0"),
    )
    # At the peaks: 70.9 ms of arithmetic against 5.3 ms of weights.
    assert step["matmul_s"] * 0.6 == pytest.approx(70.87e-3, rel=0.01)
    assert step["weight_read_s"] * 0.8 == pytest.approx(5.265e-3, rel=0.02)


def test_c1_and_c8_a_prefix_hits_in_whole_blocks_up_to_its_first_change():
    def hit(length: int, common: int, block: int) -> int:
        words = ("paging", "--lengths", length, "--block-size", block, "--common-prefix", common)
        return int(plan(*words)["prefix"]["hit_tokens"])

    assert [hit(280, 240, block) for block in (16, 32, 784)] == [240, 224, 0]
    assert [hit(2000, common, 16) for common in (40, 1990)] == [32, 1984]


def test_h7_what_adapters_really_take(tmp_path):
    model = config(
        tmp_path,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=11008,
    )
    every = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    words = ("lora", "--model", model, "--targets", every, "--sequences", 4, "--context", 2048)
    for rank in (16, 64):
        assert plan(*words, "--rank", rank)["adapter_bytes"] == 2498560 * rank * 2
    slots = plan(*words, "--rank", 64, "--adapters", 4)
    assert slots["kv_tokens_displaced"] == pytest.approx(2440, rel=0.001)
    assert slots["flops_share"] == pytest.approx(0.0247, rel=0.002)
    assert "a greater loss than that is overhead" in slots["verdict"]
