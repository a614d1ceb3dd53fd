"""What binds and what to change, in words and numbers: one test a verdict."""

from __future__ import annotations

import json
import re

import pytest

from support.plan_cli import plan

QWEN = ("--model", "qwen3-8b")
H100 = ("--device", "h100-sxm")


def test_equal_lengths_waste_nothing_more_when_reserved_whole():
    numbers = plan("paging", "--lengths", "16,16,16", "--max-len", 16, "--block-size", 4)
    assert numbers["reserved"]["unused_tokens"] == numbers["paged"]["unused_tokens"] == 0
    assert "whole reservation wastes nothing more" in numbers["verdict"]
    ragged = plan("paging", "--lengths", "15,15,15", "--max-len", 15, "--block-size", 4)
    assert (ragged["reserved"]["unused_tokens"], ragged["paged"]["unused_tokens"]) == (0, 3)
    assert "paging gains nothing here" in ragged["verdict"]
    mixed = plan("paging", "--lengths", "2,16", "--max-len", 16, "--block-size", 2)
    assert "wastes nothing" not in mixed["verdict"]
    assert "1.78 times as many" in mixed["verdict"]


@pytest.mark.parametrize(
    ("words", "weights"), [(("--quantization", "fp8"), 0.55), (("--tensor-parallel-size", 4), 0.2501)]
)
def test_quantised_or_sharded_weights_move_the_knee(words, weights):
    plain, changed = plan("read", *QWEN), plan("read", *QWEN, *words)
    ratio = changed["weight_bytes_per_step"] / plain["weight_bytes_per_step"]
    assert ratio == pytest.approx(weights, abs=0.01)
    assert "the knee moves from batch 51 to" in changed["verdict"]
    assert f"from batch 51 to {changed['knee_batch']}." in changed["verdict"]
    assert "the knee moves" not in plain["verdict"]


def test_quantised_weights_bring_the_knee_nearer_and_quantised_kv_moves_it_away():
    assert plan("read", *QWEN, "--quantization", "awq")["knee_batch"] < 25
    assert plan("read", *QWEN, "--kv-cache-dtype", "fp8")["knee_batch"] == 101
    # Weights and KV are both split by four, so the knee stays where it was (but for the norms, kept whole).
    assert plan("read", *QWEN, "--tensor-parallel-size", 4)["knee_batch"] == 51


def test_the_pool_is_full_before_the_knee():
    numbers = plan("read", *QWEN, "--device", "rtx4090")
    assert numbers["sequences_that_fit"] < numbers["knee_batch"]
    assert f"full at {numbers['sequences_that_fit']} sequences, before the knee at 51" in numbers["verdict"]
    roomy = plan("read", *QWEN, *H100)
    assert roomy["sequences_that_fit"] > 51
    assert "the knee at 51 is within reach" in roomy["verdict"]
    assert "does not fit l4 at all" in plan("read", "--model", "qwen3-32b", "--device", "l4")["verdict"]


def test_a_prefix_that_differs_midway_hits_only_in_part():
    numbers = plan("paging", "--lengths", 2000, "--block-size", 16, "--common-prefix", 40)
    assert numbers["prefix"]["hit_tokens"] == 32
    assert "agree in their first 40 tokens hit in 32" in numbers["verdict"]
    assert "after the first difference is computed again" in numbers["verdict"]
    never = plan("paging", "--lengths", 2000, "--block-size", 784, "--common-prefix", 240)
    assert never["prefix"]["hit_tokens"] == 0
    assert "never hits" in never["verdict"]
    # The last token is always computed, so a prompt that is cached whole hits one block less.
    assert plan("paging", "--lengths", 64, "--block-size", 16, "--common-prefix", 64)["prefix"]["hit_tokens"] == 48


def test_doubling_the_batch_gains_less_than_twice():
    numbers = plan("read", *QWEN, "--batch", "32,64")
    gain = numbers["rows"][1]["throughput_gain"]
    assert 1 < gain < 2
    assert f"from 32 to 64 yields {gain:.2f} times the tokens a second, not twice" in numbers["verdict"]
    assert "as good as twice" in plan("read", *QWEN, "--context", 1, "--batch", "1,2")["verdict"]


def test_past_the_knee_kv_binds_and_below_it_weights():
    assert "At 64 KV binds" in plan("read", *QWEN, "--batch", "1,64")["verdict"]
    assert "at 8 weights still bind" in plan("read", *QWEN, "--batch", "1,8")["verdict"]
    no_context = plan("read", *QWEN, "--context", 0)
    assert (no_context["knee_batch"], no_context["floor_bytes"]) == (None, 0)
    assert "weights alone bind" in no_context["verdict"]


def test_ttft_holds_the_queue_and_the_chunks_overhead():
    words = (*QWEN, *H100, "--input-tokens", 8192, "--batch", 32, "--queue-s", 0.1)
    numbers = plan("latency", *words, "--max-num-batched-tokens", 1024)
    whole = plan("latency", *words)
    assert numbers["ttft_s"] == pytest.approx(0.1 + numbers["prefill_s"])
    assert numbers["prefill_s"] > whole["prefill_s"]
    assert "TTFT is not prefill alone" in numbers["verdict"]
    assert "100 ms of queue" in numbers["verdict"]
    assert "in 9 chunks beside running decodes" in numbers["verdict"]
    assert "TTFT is not" not in plan("latency", "--prefill-s", 0.1, "--itl-s", 0.01)["verdict"]


def test_smaller_pages_cost_entries_and_allocations():
    numbers = plan("paging", "--lengths", "100,37,250", "--block-size", 16, "--sweep")
    by_size = {row["block_size"]: row for row in numbers["sweep"]}
    assert by_size[8]["table_entries"] > by_size[16]["table_entries"]
    assert f"for {by_size[8]['table_entries']} table entries and allocations" in numbers["verdict"]
    assert f"instead of {by_size[16]['table_entries']}" in numbers["verdict"]
    unused = [row["unused_tokens"] for row in numbers["sweep"]]
    assert unused == sorted(unused)
    assert by_size[1]["unused_tokens"] == 0


def test_adapters_fit_while_kv_binds_and_the_other_way_round():
    words = ("lora", *QWEN, "--adapters", 100, "--rank", 16)
    many = plan(*words, "--sequences", 100, "--context", 8192)
    assert many["binds"] == "kv"
    assert "The adapters fit in 1.428 GiB while KV binds" in many["verdict"]
    few = plan(*words, "--sequences", 1, "--context", 100)
    assert few["binds"] == "adapters"
    assert "The adapters bind" in few["verdict"]
    full = plan(*words, "--sequences", 100, "--context", 8192, *H100)
    assert full["fits"] is False
    assert "Together they need" in full["verdict"]
    assert plan(*words, "--sequences", 10, *H100)["fits"] is True


def test_short_contexts_are_recomputed_and_long_ones_swapped():
    words = ("swap", *QWEN, *H100, "--running", 32, "--context", 256)
    short, long = plan(*words, "--tokens", 64), plan(*words, "--tokens", 32768)
    assert (short["choose"], long["choose"]) == ("recompute", "swap")
    assert 64 < short["break_even_tokens"] < 32768
    assert "Short contexts favour recompute" in short["verdict"] or "recompute is cheaper" in short["verdict"]
    assert f"from {short['break_even_tokens']:,} tokens, favour swap" in short["verdict"]
    refused = plan(*words, "--tokens", 32768, "--ttft-target-s", 0.1)
    assert refused["choose"] == "refuse"
    assert "Refuse or degrade" in refused["verdict"]
    assert plan(*words, "--tokens", 64, "--ttft-target-s", 0.1)["choose"] == "recompute"


def test_what_the_prefix_cache_gives_back_is_not_computed():
    words = ("swap", *QWEN, *H100, "--tokens", 16384)
    none, most = plan(*words), plan(*words, "--cached-tokens", 16000)
    assert most["recompute_s"] < none["recompute_s"] / 5
    assert (none["choose"], most["choose"]) == ("swap", "recompute")
    assert most["swap_s"] == none["swap_s"]


def test_without_a_host_link_there_is_only_recompute(tmp_path):
    numbers = plan("swap", *QWEN, "--device", "apple-m4-max", "--tokens", 1000)
    assert (numbers["swap_s"], numbers["break_even_tokens"], numbers["choose"]) == (None, None, "recompute")
    assert "no host link" in numbers["verdict"]


def test_a_slow_card_always_swaps():
    numbers = plan("swap", *QWEN, "--device", "l4", "--tokens", 1000)
    assert (numbers["choose"], numbers["break_even_tokens"]) == ("swap", None)
    assert "Swap is cheaper at every length" in numbers["verdict"]


def test_decode_near_the_bandwidth_is_set_by_memory_and_beyond_it_is_impossible():
    words = (*QWEN, "--device", "h100-sxm", "--input-tokens", 2048)
    near = plan("latency", "--prefill-s", 0.1, "--itl-s", 0.0055, *words)
    assert "memory sets the pace" in near["verdict"]
    beyond = plan("latency", "--prefill-s", 0.001, "--itl-s", 0.001, *words)
    assert beyond["decode_bandwidth_share"] > 1
    assert beyond["verdict"].count("cannot be") == 2
    idle = plan("latency", "--prefill-s", 1, "--itl-s", 0.0055, *words)
    assert "too short, or chunked too fine" in idle["verdict"]


def test_a_chunk_over_the_target_names_the_largest_that_keeps_it():
    words = ("chunk", "--prefill-rate", 520, "--prompt", 30720, "--itl-target-s", 0.2)
    over = plan(*words, "--chunk", 4096)
    assert (over["gaps"], over["max_chunk_for_target"]) == (8, 104)
    assert over["worst_gap_s"] == pytest.approx(4096 / 520)
    assert "use a chunk of at most 104 (now 4,096)" in over["verdict"]
    assert "within the target" in plan(*words, "--chunk", 104)["verdict"]
    short = plan("chunk", "--prefill-rate", 520, "--prompt", 100, "--chunk", 4096)
    assert (short["worst_gap_s"], short["gaps"], short["max_chunk_for_target"]) == (pytest.approx(100 / 520), 1, None)


def test_a_predicted_chunk_keeps_its_target_and_one_more_token_does_not():
    words = ("chunk", *QWEN, *H100, "--prompt", 20000, "--running", 16, "--itl-target-s", 0.05)
    largest = plan(*words, "--chunk", 512)["max_chunk_for_target"]
    assert plan(*words, "--chunk", largest)["worst_gap_s"] <= 0.05
    assert plan(*words, "--chunk", largest + 1)["worst_gap_s"] > 0.05
    fine, coarse = plan(*words, "--chunk", 256), plan(*words, "--chunk", 2048)
    assert fine["ttft_cost_s"] > coarse["ttft_cost_s"] > 0
    assert "buys bounded gaps, not throughput" in fine["verdict"]
    assert "no chunk keeps the target" in plan(*words[:-1], 0.001, "--chunk", 512)["verdict"]


def test_capacity_adds_up_and_says_what_binds():
    numbers = plan("capacity", *QWEN, *H100, "--context", 8192)
    parts = [numbers[f"{part}_bytes"] for part in ("weights", "activations", "reserve", "kv_pool")]
    assert sum(parts) == numbers["memory_bytes"] == 80 * 2**30
    assert numbers["tokens"] == numbers["blocks"] * 16 == numbers["kv_pool_bytes"] // (16 * 147456) * 16
    assert numbers["sequences"] == numbers["blocks"] // 512
    assert numbers["binds"] == "kv"
    assert "--kv-cache-dtype fp8" in numbers["verdict"]
    capped = plan("capacity", *QWEN, *H100, "--context", 8192, "--max-num-seqs", 8)
    assert (capped["binds"], capped["sequences"]) == ("sequences", 8)
    assert "The cap on sequences binds" in capped["verdict"]
    never = plan("capacity", "--model", "qwen3-32b", "--device", "l4")
    assert (never["binds"], never["sequences"], never["kv_pool_bytes"] < 0) == ("weights", 0, True)
    assert "The weights do not fit" in never["verdict"]


def test_a_context_that_does_not_fit_names_the_largest_that_does():
    words = ("capacity", "--model", "llama-3.1-8b", "--device", "rtx4090")
    numbers = plan(*words, "--context", 131072)
    longest = numbers["largest_max_model_len"]
    assert numbers["sequences"] == 0
    assert f"the largest max_model_len is {longest:,}" in numbers["verdict"]
    assert plan(*words, "--context", longest)["sequences"] == 1
    assert plan(*words, "--context", longest + 1)["sequences"] == 0
    beyond = plan("capacity", *QWEN, *H100, "--context", 50000)
    assert "positions end at 40,960" in beyond["verdict"]


def test_a_utilisation_near_one_is_warned_of():
    words = ("capacity", *QWEN, *H100, "--gpu-memory-utilization")
    assert "stay at 0.95 or below" in plan(*words, 1.0)["verdict"]
    assert "0.95" not in plan(*words, 0.9)["verdict"]


def test_a_cpu_keeps_its_pool_small():
    numbers = plan("capacity", "--model", "smollm2-135m", "--device", "cpu-cloud-2vcpu", "--context", 2048)
    assert numbers["kv_pool_bytes"] == 4 * 2**30  # the smaller of 4 GiB and a quarter of 24
    stated = plan(
        *("capacity", "--model", "smollm2-135m", "--device", "cpu-cloud-2vcpu", "--gpu-memory-utilization", 0.5)
    )
    assert stated["kv_pool_bytes"] > 4 * 2**30


def test_a_step_says_which_side_of_the_roofline_it_lies_on():
    words = ("step", *QWEN, *H100)
    decode = plan(*words, "--decodes", 8)
    assert decode["binds"] == "bandwidth"
    prefill = plan(*words, "--prefill", "4096:0")
    assert prefill["binds"] == "compute"
    assert "arithmetic binds" in prefill["verdict"]
    tiny = plan("step", "--model", "smollm2-135m", *H100, "--decodes", 1)
    assert tiny["binds"] == "host"
    assert "host time binds" in tiny["verdict"]
    for numbers in (decode, prefill, tiny):
        assert sum(numbers["terms"].values()) == pytest.approx(numbers["total_s"])


def test_padding_to_a_bucket_is_priced():
    words = ("step", *QWEN, *H100, "--buckets", "1,2,4,8,16,32")
    padded = plan(*words, "--decodes", 17)
    assert (padded["tokens"], padded["padded_tokens"], padded["bucket"]) == (17, 32, 32)
    bare = plan("step", *QWEN, *H100, "--decodes", 17)
    assert padded["padding_s"] == pytest.approx(padded["total_s"] - bare["total_s"])
    assert padded["padding_s"] > 0
    assert "Padding 17 rows to the bucket of 32" in padded["verdict"]
    assert "nothing is padded" in plan(*words, "--decodes", 16)["verdict"]
    for other in (("--decodes", 33), ("--decodes", 17, "--prefill", "64:0")):
        assert plan(*words, *other)["bucket"] is None


def test_a_file_and_a_trace_give_the_same_lengths(tmp_path):
    csv = tmp_path / "trace.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,8,1\n2023,10,3\n")
    lines = tmp_path / "trace.jsonl"
    lines.write_text("\n".join(json.dumps({"input_length": a, "output_length": b}) for a, b in [(8, 1), (10, 3)]))
    plain = tmp_path / "lengths.txt"
    plain.write_text("9\n13\n")
    expected = plan("paging", "--lengths", "9,13", "--block-size", 4)
    for path in (csv, lines, plain):
        assert plan("paging", "--trace", path, "--block-size", 4) == expected


def test_a_real_length_distribution(shared):
    trace = shared / "traces" / "azure2023" / "AzureLLMInferenceTrace_code.csv"
    numbers = plan("paging", "--trace", trace, "--block-size", 16, "--max-len", 8192)
    assert numbers["sequences"] == 8819
    assert 0.5 * 15 < numbers["paged"]["unused_tokens"] / 8819 < 0.5 * 15 + 1  # half a block each
    assert re.search(r"[2-9]\.\d+ times as many", numbers["verdict"])
