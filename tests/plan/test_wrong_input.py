"""Each kind of wrong input is one line that names it, and exit code 2."""

from __future__ import annotations

import json

import pytest

from support.plan_cli import refusal

QWEN = "--model qwen3-8b"
H100 = "--device h100-sxm"

CASES = [
    # unknown names
    ("read --model qwen3-8bb", "model 'qwen3-8bb' is not a preset and not a file; did you mean qwen3-8b"),
    (f"read {QWEN} --device h1000", "device 'h1000' is not a preset"),
    (f"read {QWEN} --quantization int3", "quantization 'int3' is not known"),
    (f"read {QWEN} --kv-cache-dtype fp7", "kv_cache_dtype 'fp7' is not known; did you mean fp8"),
    (f"lora {QWEN} --targets query", "has no linear 'query'"),
    ("read --model none.json", "model file none.json does not exist"),
    ("read --model none.gguf", "model file none.gguf does not exist"),
    (f"capacity {QWEN} --device none.json", "device file none.json"),
    ("nothing", "No such command 'nothing'"),
    (f"read {QWEN} --batches 1", "No such option: --batches"),
    # missing
    ("read", "Missing option '--model'"),
    (f"capacity {QWEN}", "Missing option '--device'"),
    ("latency --itl-s 0.1", "prefill_s is missing"),
    ("latency --prefill-s 0.1", "itl_s is missing"),
    (f"latency {QWEN} {H100}", "input_tokens is missing"),
    (f"latency {H100} --prefill-s 1 --itl-s 1", "model is missing"),
    (f"latency {QWEN} --input-tokens 10", "device is missing"),
    ("paging", "give either lengths or trace"),
    ("chunk --prompt 10 --chunk 10", "give either prefill_rate, or model and device"),
    (f"chunk --prompt 10 --chunk 10 {QWEN}", "device is missing"),
    (f"step {QWEN} {H100}", "the step has nothing to do"),
    # not a number, or not a finite one
    (f"read {QWEN} --batch 1,x", "batch has 'x'"),
    (f"read {QWEN} --batch 1,,2", "batch has ''"),
    (f"read {QWEN} --context abc", "Invalid value for '--context'"),
    ("latency --prefill-s nan --itl-s 1", "prefill_s is nan; it must be a finite number"),
    ("latency --prefill-s 1 --itl-s inf", "itl_s is inf"),
    ("latency --queue-s -inf --prefill-s 1 --itl-s 1", "queue_s is -inf"),
    (f"capacity {QWEN} {H100} --gpu-memory-utilization nan", "gpu_memory_utilization is nan"),
    (f"capacity {QWEN} {H100} --other-gib nan", "other_gib is nan"),
    ("chunk --prefill-rate nan --prompt 10 --chunk 10", "prefill_rate is nan"),
    (f"chat {QWEN} {H100} --users 10 --think-time-s nan", "think_time_s is nan"),
    (f"step {QWEN} {H100} --prefill 512-0", "prefill has '512-0'; it must be NEW:CACHED"),
    # out of range
    (f"read {QWEN} --batch 0", "batch is 0; it must be from 1"),
    (f"read {QWEN} --batch 1,-4", "batch is -4"),
    (f"read {QWEN} --context -1", "context is -1"),
    (f"read {QWEN} --block-size 0", "block_size is 0"),
    (f"read {QWEN} --tensor-parallel-size 0", "tensor_parallel_size is 0"),
    (f"read {QWEN} --tensor-parallel-size 5", "tensor_parallel_size 5 does not divide num_heads 32"),
    ("latency --queue-s -1 --prefill-s 1 --itl-s 1", "queue_s is -1; it must be at least 0"),
    ("latency --prefill-s 0 --itl-s 1", "prefill_s is 0; it must be above 0"),
    ("latency --prefill-s 1 --itl-s 1 --output-tokens 0", "output_tokens is 0"),
    ("paging --lengths 9,-13", "lengths is -13"),
    ("paging --lengths 0", "lengths is 0"),
    ("paging --lengths 9,17 --max-len 16", "lengths has 17"),
    ("paging --lengths 9 --block-size 0", "block_size is 0"),
    ("paging --lengths 9 --common-prefix -1", "common_prefix is -1"),
    (f"lora {QWEN} --rank 0", "rank is 0"),
    (f"lora {QWEN} --rank 5000", "rank is 5000; it must be from 1 to the hidden size, 4096"),
    (f"lora {QWEN} --adapters 0", "adapters is 0"),
    (f"lora {QWEN} --adapters 4 --sequences 8 --distinct 5", "distinct is 5"),
    (f"capacity {QWEN} {H100} --gpu-memory-utilization 1.5", "gpu_memory_utilization is 1.5"),
    (f"capacity {QWEN} {H100} --gpu-memory-utilization 0", "gpu_memory_utilization is 0; it must be above 0"),
    (f"capacity {QWEN} {H100} --max-num-seqs 0", "max_num_seqs is 0"),
    (f"capacity {QWEN} {H100} --max-num-batched-tokens 0", "max_num_batched_tokens is 0"),
    (f"capacity {QWEN} {H100} --context 0", "context is 0"),
    (f"capacity {QWEN} --device cpu-cloud-2vcpu --tensor-parallel-size 64", "does not divide num_heads"),
    ("chunk --prefill-rate 0 --prompt 10 --chunk 10", "prefill_rate is 0; it must be above 0"),
    ("chunk --prefill-rate 1 --prompt 0 --chunk 10", "prompt is 0"),
    ("chunk --prefill-rate 1 --prompt 10 --chunk 0", "chunk is 0"),
    ("chunk --prefill-rate 1 --prompt 10 --chunk 1 --itl-target-s 0", "itl_target_s is 0"),
    (f"swap {QWEN} {H100} --tokens 0", "tokens is 0"),
    (f"swap {QWEN} {H100} --tokens 10 --cached-tokens 10", "cached_tokens is 10; it must be below tokens, 10"),
    (f"swap {QWEN} {H100} --tokens 10 --ttft-target-s 0", "ttft_target_s is 0"),
    (f"swap {QWEN} {H100} --tokens 10 --running -1", "running is -1"),
    (f"swap {QWEN} {H100} --tokens 10 --max-num-batched-tokens 32", "32 decodes leave no room for a chunk"),
    (f"capacity {QWEN} {H100} --other-gib 1e308", "other_gib is 1e+308"),
    (f"step {QWEN} {H100} --decodes -1", "decodes is -1"),
    (f"step {QWEN} {H100} --prefill 0:5", "prefill's new tokens is 0"),
    (f"step {QWEN} {H100} --decodes 1 --buckets 0", "buckets is 0"),
    (f"step {QWEN} --device apple-m4-max --decodes 1 --tensor-parallel-size 2", "has no peer_link_gbps_one_way"),
    (f"chat {QWEN} {H100} --users 0", "users is 0"),
    (f"chat {QWEN} {H100} --users 1 --turns 0", "turns is 0"),
    (f"chat {QWEN} {H100} --users 1 --system-tokens -1", "system_tokens is -1"),
    (f"chat {QWEN} {H100} --users 1 --turns 5000", "a conversation grows to 2500000 tokens; the pool holds"),
    (f"latency {QWEN} {H100} --input-tokens 10 --batch 9 --max-num-batched-tokens 8", "8 decodes leave no room"),
]


@pytest.mark.parametrize(("command", "said"), CASES, ids=[command for command, _ in CASES])
def test_wrong_input_is_one_line_that_names_it(command, said):
    assert said in refusal(*command.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "must hold one JSON object"),
        (json.dumps({"model_type": "qwen3", "num_key_value_heads": 2}), "config.json has no"),
        (json.dumps({"model_type": "martian"}), "martian"),
    ],
)
def test_a_config_without_a_field_names_it(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert said in refusal("read", "--model", path)
    assert said in refusal("read", "--model", tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("9\nx\n", "line 2 is 'x'"),
        ("a,b\n1,2\n", "line 2 has no token counts"),
        ('{"input_length": 5}\n', "line 1 has no token counts"),
        ('{"input_length": 5, "output_length": -1}\n', "line 1: output_length is -1"),
        ('{"input_length": 5,\n', "line 1 is not JSON"),
    ],
)
def test_a_wrong_trace_names_the_line(tmp_path, content, said):
    path = tmp_path / "trace.txt"
    path.write_text(content)
    assert said in refusal("paging", "--trace", path)


def test_a_plot_of_another_kind_is_refused(tmp_path):
    said = refusal("read", "--model", "qwen3-8b", "--plot", tmp_path / "a.pdf")
    assert "must end in .png or .svg" in said
    assert "cannot write" in refusal("read", "--model", "qwen3-8b", "--plot", tmp_path / "none" / "a.png")
