"""The step cost against its formula written out, and against itself."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from foliolm.core.errors import ConfigError
from foliolm.core.plan import DecodeRows, LogitsAt, Row, StepPlan
from foliolm.ledger.accounts import account
from foliolm.ledger.plan_cost import PlanCost, counts_of_plan
from foliolm.ledger.step_cost import Coefficients, StepCounts, step_cost
from foliolm.ledger.treatments import (
    HostLink,
    Running,
    marginal_seconds,
    prefill_seconds,
    recompute_seconds,
    swap_seconds,
    turning_points,
)
from foliolm.shape.presets import device_preset, model_preset

H100 = device_preset("h100-sxm")
QWEN = step_cost(account(model_preset("qwen3-8b").shape), H100)
GEMMA = step_cost(account(model_preset("gemma-3-27b-it").shape), H100)


def test_the_formula_written_out():
    c = QWEN.coefficients
    bandwidth, flops, k = 3350e9, 989.4e12, 147456
    counts = QWEN.counts([1000, 2000, 3000], [(512, 1024), (100, 0)], sampled_prefills=1)
    weights = 15136811008 / (c.weights * bandwidth)
    matmul = 2 * (6946075648 * 615 + 151936 * 4096 * 4) / (c.matmul * flops)
    pairs = 512 * 1024 + 512**2 / 2 + 100**2 / 2
    expected = {
        "host": c.step_s + 36 * c.layer_s,
        "sequences": 5 * c.sequence_s,
        "tokens": 0.0,
        "linears": math.sqrt(weights**2 + matmul**2),
        "decode_attention": 6000 * k / (c.kv_mixed * bandwidth),
        "prefill_attention": 36 * 2 * 32 * 256 * pairs / (c.attention * flops),
        "prefix_read": 1024 * k / bandwidth,
        "all_reduce": 0.0,
        "lora": 0.0,
        "swap": 0.0,
    }
    terms = QWEN.terms(counts)
    assert terms.parts() == pytest.approx(expected)
    assert terms.total == pytest.approx(sum(expected.values())) == QWEN.seconds(counts)


def test_decode_only_steps_read_kv_at_their_own_efficiency():
    alone = QWEN.terms(QWEN.counts([4096] * 8)).decode_attention
    mixed = QWEN.terms(QWEN.counts([4096] * 8, [(16, 0)])).decode_attention
    assert mixed / alone == pytest.approx(0.9 / 0.5)


def test_an_empty_step_is_free():
    assert QWEN.seconds(StepCounts(0, 0, 0)) == 0


def test_nothing_sampled_reads_no_head():
    chunk = QWEN.counts([], [(512, 0)], sampled_prefills=0)
    last = QWEN.counts([], [(512, 0)])
    assert QWEN.terms(chunk).weight_read < QWEN.terms(last).weight_read


def test_windows_clamp_each_row():
    counts = GEMMA.counts([100, 5000])
    assert counts.decode_context == (5100.0, 1124.0)
    per_layer = 2 * 16 * 128 * 2
    bytes_read = 10 * per_layer * 5100 + 52 * per_layer * 1124
    assert GEMMA.terms(counts).decode_attention == pytest.approx(bytes_read / (0.9 * 3350e9))


def test_mla_decode_may_bind_on_compute():
    shape = model_preset("deepseek-v3").shape
    on_h100 = step_cost(account(shape), H100)
    counts = on_h100.counts([8192] * 64)
    context = 64 * 8192
    compute = context * 61 * 2 * 128 * (576 + 512) / (0.5 * 989.4e12)
    read = context * 61 * 576 * 2 / (0.9 * 3350e9)
    assert compute > read
    assert on_h100.terms(counts).decode_attention == pytest.approx(compute)
    assert QWEN.terms(QWEN.counts([8192] * 64)).decode_attention == pytest.approx(64 * 8192 * 147456 / (0.9 * 3350e9))


def test_a_moe_step_reads_more_experts_with_more_tokens():
    moe = step_cost(account(model_preset("qwen3-30b-a3b").shape), H100)
    reads = [moe.terms(moe.counts([10] * batch)).weight_read for batch in (1, 8, 64, 512)]
    assert reads == sorted(reads)
    assert reads[-1] > 5 * reads[0]


def test_sharding_halves_the_work_and_adds_the_exchange():
    shape = model_preset("llama-3.1-70b").shape
    one, two = step_cost(account(shape), H100), step_cost(account(shape, tensor_parallel_size=2), H100)
    counts = one.counts([2048] * 16)
    assert two.terms(counts).weight_read == pytest.approx(one.terms(counts).weight_read / 2, rel=1e-3)
    sent = 2 * 80 * 16 * 8192 * 2 * 2 * 0.5 / (0.8 * 450e9)
    assert two.terms(counts).all_reduce == pytest.approx(sent + 160 * 20e-6)
    with pytest.raises(ConfigError, match="cpu-cloud-2vcpu has no peer_link"):
        step_cost(account(shape, tensor_parallel_size=2), device_preset("cpu-cloud-2vcpu"))


def test_fp8_weights_compute_at_the_fp8_rate_and_attention_does_not():
    fp8 = step_cost(account(model_preset("qwen3-8b").shape, "fp8"), H100)
    assert (fp8.flops, fp8.attention_peak) == (1978.9e12, 989.4e12)
    awq = step_cost(account(model_preset("qwen3-8b").shape, "awq"), H100)
    assert awq.flops == 989.4e12  # widened to 16 bits for the product


def test_lora_adds_its_bytes_and_flops():
    counts = replace(QWEN.counts([100] * 4), lora_bytes=1e9, lora_flops=1e12)
    assert QWEN.terms(counts).lora == pytest.approx(1e9 / (0.8 * 3350e9) + 1e12 / (0.6 * 989.4e12))


def test_padding_costs_tokens_but_no_context():
    bare, padded = QWEN.counts([100] * 5), QWEN.counts([100] * 5, padded_decodes=8)
    assert (padded.new_tokens, padded.sequences, padded.decode_context) == (8, 5, bare.decode_context)
    assert QWEN.seconds(padded) > QWEN.seconds(bare)


@pytest.mark.parametrize("name", [field.name for field in fields(Coefficients)])
def test_coefficients_are_checked(name):
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"coefficient {name} is"):
            Coefficients(**{name: wrong})


@pytest.mark.parametrize("cost", [QWEN, GEMMA], ids=["full", "windowed"])
def test_a_plan_counts_as_its_rows_do(cost):
    plan = StepPlan(
        1,
        0,
        decodes=DecodeRows((1, 2), (90, 4990), tick=10, version=1, context_tokens=5100),
        rows=(
            Row(3, 512, 1024, logits=LogitsAt.NONE),
            Row(4, 100, 0, logits=LogitsAt.LAST),
            Row(5, 1, 700, logits=LogitsAt.LAST),
        ),
        padded_tokens=615,
    )
    expected = cost.counts([100, 5000, 700], [(512, 1024), (100, 0)], sampled_prefills=1)
    assert counts_of_plan(cost.model, plan) == expected
    assert PlanCost(cost).seconds(plan) == cost.seconds(expected)
    scored = replace(plan, rows=(Row(4, 100, 0, logits=LogitsAt.ALL),))
    assert counts_of_plan(cost.model, scored).sampled == 2 + 100


def test_a_prefill_in_chunks_costs_more_than_whole():
    whole = prefill_seconds(QWEN, 8192)
    chunked = prefill_seconds(QWEN, 8192, chunk=512)
    assert whole < chunked < 1.5 * whole
    assert prefill_seconds(QWEN, 8192, cached=8000) < prefill_seconds(QWEN, 8192) / 10


def test_marginal_cost_is_the_difference_of_two_steps():
    running = Running(16, 1000, 2048)
    both = QWEN.seconds(QWEN.counts([1000] * 16, [(256, 512)]))
    assert marginal_seconds(QWEN, running, 256, 512) == pytest.approx(both - QWEN.seconds(QWEN.counts([1000] * 16)))


def test_recompute_sums_its_chunks_and_skips_what_is_cached():
    running = Running(48, 1000, 2048)
    by_hand = sum(
        marginal_seconds(QWEN, running, new, done, last) for new, done, last in [(2000, 0, False), (1000, 2000, True)]
    )
    assert recompute_seconds(QWEN, 3000, 0, running) == pytest.approx(by_hand)
    assert recompute_seconds(QWEN, 3000, 2000, running) == pytest.approx(marginal_seconds(QWEN, running, 1000, 2000))
    assert recompute_seconds(QWEN, 3000, 3000, running) == 0


@pytest.mark.parametrize("cost", [QWEN, GEMMA], ids=["full", "windowed"])
def test_many_chunks_are_priced_by_a_sample_of_them(cost):
    running = Running(4, 500, 12)
    one_by_one = sum(
        marginal_seconds(cost, running, min(8, 5003 - done), done, done + 8 >= 5003) for done in range(0, 5003, 8)
    )
    assert recompute_seconds(cost, 5003, 0, running) == pytest.approx(one_by_one, rel=1e-5)
    assert prefill_seconds(cost, 5003, chunk=8) == pytest.approx(
        sum(prefill_seconds(cost, min(done + 8, 5003), done) for done in range(0, 5003, 8))
        - 625 * (prefill_seconds(cost, 8) - cost.seconds(cost.counts([], [(8, 0)], sampled_prefills=0))),
        rel=1e-4,
    )


def test_swap_moves_whole_blocks_out_and_in():
    link = HostLink(64e9, 0.8, 5e-6)
    blocks = 7  # of 100 tokens
    expected = 2 * (blocks * 36 * 5e-6 + blocks * 16 * 147456 / (0.8 * 64e9))
    assert swap_seconds(QWEN.model, 100, link, 16) == pytest.approx(expected)
    assert swap_seconds(QWEN.model, 100, link, 16, overlap_s=1) == 0
    raw = replace(link, copies_per_block=1)
    assert swap_seconds(QWEN.model, 100, raw, 16) == pytest.approx(expected - 2 * blocks * 35 * 5e-6)


def test_the_turning_points_are_where_the_cheaper_one_changes():
    link, running = HostLink(64e9), Running(32, 1024, 8192)
    turns = turning_points(QWEN, link, 16, 0, running, 40960)
    assert turns.break_even is not None and turns.first is not None

    def swap_wins(tokens: int) -> bool:
        return swap_seconds(QWEN.model, tokens, link, 16) <= recompute_seconds(QWEN, tokens, 0, running)

    assert swap_wins(turns.break_even) and not swap_wins(turns.break_even - 16)
    assert not swap_wins(turns.first) and swap_wins(turns.first - 16)
    assert all(swap_wins(tokens) for tokens in range(turns.break_even, 40960, 1600))
