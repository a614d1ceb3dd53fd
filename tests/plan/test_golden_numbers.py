"""The known answers, from shapes, through the command line, to the digits given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.plan_cli import plan

GIB = 2**30
GOLDEN = json.loads((Path(__file__).parent / "golden_serving_numbers.json").read_text())
QWEN = ("--model", "qwen3-8b")


def digits(given: float) -> float:
    """Half a unit of the last digit that a JSON number gives."""
    text = repr(given)
    return 0.5 * 10 ** -len(text.partition(".")[2]) if "." in text and not text.endswith(".0") else 0.5


def same(value: float, given: float) -> bool:
    return abs(value - given) <= digits(given) * (1 + 1e-9)


def test_the_copy_is_the_shared_file(shared):
    known = json.loads((shared / "golden" / "serving_numbers.json").read_text())
    assert {key: known[key] for key in GOLDEN} == GOLDEN


def test_read():
    known = GOLDEN["read_per_output_token"]
    numbers = plan("read", *QWEN, "--context", known["context"], "--batch", "1,16,32,64")
    assert numbers["weight_bytes_per_step"] == GOLDEN["weights"]["weight_bytes_per_step"]
    assert same(numbers["weight_bytes_per_step"] / GIB, GOLDEN["weights"]["weight_gib_per_step"])
    assert numbers["kv_bytes_per_token"] == GOLDEN["kv"]["kv_bytes_per_token"]
    assert numbers["floor_bytes"] / GIB == known["floor_gib"] == GOLDEN["kv"]["kv_gib"]
    assert numbers["knee_batch"] == known["knee_batch"]
    assert same(numbers["ratio_first_to_last"], known["ratio_b1_to_b64"])
    for row, expected in zip(numbers["rows"], known["rows"], strict=True):
        assert row["batch"] == expected["batch"]
        assert same(row["weight_bytes"] / GIB, expected["weight_gib"])
        assert same(row["kv_bytes"] / GIB, expected["kv_gib"])
        assert same(row["total_bytes"] / GIB, expected["total_gib"])
        assert row["kv_share"] == pytest.approx(row["kv_bytes"] / row["total_bytes"])
        assert row["throughput_gain"] == pytest.approx(numbers["rows"][0]["total_bytes"] / row["total_bytes"])
    by_batch = {row["batch"]: row for row in numbers["rows"]}
    for expected in known["whole_step"]:
        row = by_batch[expected["batch"]]
        assert same(row["step_bytes"] / GIB, expected["step_gib"])
        assert row["kv_resident_bytes"] / GIB == expected["kv_resident_gib"]
        assert row["intensity_flop_per_weight_byte"] == expected["intensity_flop_per_weight_byte"]
    assert numbers["rows"][-1]["throughput_gain"] == numbers["ratio_first_to_last"]


def test_arithmetic_intensity():
    batches = [batch for batch, _ in GOLDEN["arithmetic_intensity"]["bf16"]]
    rows = plan("read", *QWEN, "--batch", ",".join(map(str, batches)))["rows"]
    found = [[row["batch"], row["intensity_flop_per_weight_byte"]] for row in rows]
    assert found == GOLDEN["arithmetic_intensity"]["bf16"]


@pytest.mark.parametrize("known", GOLDEN["request_latency"])
def test_request_latency(known):
    given = ("queue_s", "prefill_s", "itl_s", "output_tokens")
    numbers = plan("latency", *(word for name in given for word in (f"--{name.replace('_', '-')}", known[name])))
    for key in ("ttft_s", "decode_s", "e2e_s"):
        assert numbers[key] == pytest.approx(known[key], abs=1e-9)


def test_measured_reference():
    known = GOLDEN["measured_reference"]
    numbers = plan(
        *("latency", "--queue-s", 0.1, "--prefill-s", known["prefill_s"], "--itl-s", known["itl_s"]),
        *("--input-tokens", known["input_tokens"], "--batch", known["batch"], *QWEN, "--device", "rtx-pro-6000-ws"),
    )
    derived = known["derived"]
    assert same(numbers["decode_read_bytes_per_s"] / 1e9, derived["decode_read_gb_per_s"])
    assert same(numbers["decode_bandwidth_share"], derived["share_of_1792_gb_per_s"])
    assert same(numbers["prefill_flops_per_s"] / 1e12, derived["prefill_tflops_body_linears"])
    assert numbers["prefill_flops_share"] == pytest.approx(296.4 / 503.8, abs=1e-3)
    assert "a third of rtx-pro-6000-ws's bandwidth" in numbers["verdict"]
    assert "memory does not set the pace: host overhead" in numbers["verdict"]


def test_paging():
    known = GOLDEN["paging"]
    lengths = ",".join(map(str, known["lengths"]))
    numbers = plan("paging", "--lengths", lengths, "--max-len", known["max_len"], "--block-size", known["block_size"])
    assert numbers["reserved"] == known["reserved"]
    assert numbers["used_tokens"] == known["paged"].pop("used_tokens")
    assert {key: numbers["paged"][key] for key in known["paged"]} == known["paged"]
    assert numbers["paged"]["table_entries"] == numbers["paged"]["allocations"] == sum(known["paged"]["blocks"])


def test_lora():
    known = GOLDEN["lora"]
    numbers = plan(
        *("lora", *QWEN, "--rank", known["rank"], "--targets", ",".join(known["targets"])),
        *("--adapters", known["adapters"], "--sequences", known["sequences"], "--context", known["context"]),
    )
    assert numbers["adapter_bytes"] == known["adapter_bytes"] == known["adapter_mib"] * 2**20
    assert same(numbers["adapters_bytes"] / GIB, known["adapters_gib"])
    assert numbers["kv_bytes"] / GIB == known["kv_gib"]
    assert numbers["binds"] == known["binds_first"]
