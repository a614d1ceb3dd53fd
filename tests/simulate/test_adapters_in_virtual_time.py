"""Adapters in virtual time, in the books and in what is said of them."""

import pytest

from foliolm.core.adapter import AdapterRows, AdapterSize
from foliolm.core.plan import DecodeRows, StepPlan
from foliolm.ledger.accounts import account
from foliolm.ledger.plan_cost import PlanCost, counts_of_plan
from foliolm.ledger.step_cost import step_cost
from foliolm.shape.presets import device_preset, model_preset
from support.cli import refusal, run_json, run_text

FLAGS = ("--model", "qwen3-8b", "--device", "h100-sxm", "--rate", "inf", "--input-len", "100", "--output-len", "40")
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def simulate(*more, requests=120):
    return run_json("simulate", *FLAGS, "--requests", requests, *more)


def test_a_step_pays_for_its_distinct_adapters_and_for_their_rows():
    cost = step_cost(account(model_preset("qwen3-8b").shape), device_preset("h100-sxm"))
    sizes = {1: AdapterSize("a", 16, 1000, 500, 60), 2: AdapterSize("b", 8, 700, 300)}
    rows = (AdapterRows(1, 10, 3, 3), AdapterRows(2, 1, 1, 1))
    decodes = DecodeRows((1, 2, 3, 4), (9, 9, 9, 9), 1, 1, 40)
    plan = StepPlan(1, 0, decodes=decodes, padded_tokens=4, adapters=rows)
    counts = counts_of_plan(cost.model, plan, sizes)
    assert counts.lora_bytes == 1700
    assert counts.lora_flops == 2 * (500 * 10 + 60 * 3 + 300)
    bare = StepPlan(1, 0, decodes=decodes, padded_tokens=4)
    added = PlanCost(cost, sizes).seconds(plan) - PlanCost(cost, sizes).seconds(bare)
    c = cost.coefficients
    expected = 1700 / (c.weights * cost.bandwidth) + counts.lora_flops / (c.matmul * cost.flops)
    assert added == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert PlanCost(cost, sizes).seconds(plan) == pytest.approx(cost.seconds(counts))


def test_zipf_shares_and_what_they_take():
    bare = simulate()
    assert "lora" not in bare
    one = simulate("--lora-shares", "1")
    many = simulate("--lora-adapters", "40", "--lora-zipf", "0", "--max-loras", "40", "--lora-targets", TARGETS)
    half = simulate("--lora-shares", "0.3,0.2")
    assert one["lora"]["per_step"] == 1 and one["lora"]["loads"] == 1 and one["lora"]["passed_over"] == 0
    assert many["lora"]["per_step"] > 30
    assert many["simulated_s"] > one["simulated_s"] > bare["simulated_s"]
    assert 1 < half["lora"]["per_step"] <= 2
    assert half["lora"]["flops"] < 0.75 * one["lora"]["flops"]
    again = simulate("--lora-shares", "0.3,0.2")
    assert {**again, "wall_s": 0} == {**half, "wall_s": 0}


def test_slots_bound_a_step_and_grouping_makes_fewer():
    flags = ("--lora-adapters", "30", "--lora-zipf", "0.5", "--max-loras", "6", "--max-num-seqs", "12")
    arrival, cost = (simulate(*flags, "--lora-grouping", way) for way in ("arrival", "cost"))
    assert arrival["lora"]["per_step"] <= 6 and arrival["lora"]["passed_over"] > 0
    assert cost["lora"]["per_step"] < arrival["lora"]["per_step"]
    assert arrival["requests"] == cost["requests"] == 120


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora-shares", "0.5,0.7"), "sum to at most 1"),
        (("--lora-shares", "x"), "must be numbers"),
        (("--lora-shares", "1", "--lora-zipf", "1"), "leave out"),
        (("--lora-zipf", "1"), "without --lora-adapters"),
        (("--lora-adapters", "0"), "from 1 to"),
        (("--lora-adapters", "4", "--lora-targets", "query"), "no linear 'query'"),
        (("--lora-adapters", "4", "--lora-zipf", "11"), "from 0 to 10"),
    ],
)
def test_wrong_flags(flags, words):
    assert words in refusal("simulate", *FLAGS, *flags)


def test_explain_says_what_adapters_cost_and_what_grouping_would_save(tmp_path):
    books = tmp_path / "books"
    flags = ("--lora-adapters", "30", "--lora-zipf", "0.5", "--max-loras", "6", "--max-num-seqs", "12")
    simulate(*flags, "--lora-targets", TARGETS, "--ledger", books, requests=48)
    said = run_json("explain", books)
    lora, grouping = said["lora"], said["grouping"]
    assert lora["adapters"] > 15 and 4 < lora["per_step"] <= 6
    assert lora["share"] == pytest.approx(said["terms"]["lora"] / sum(said["terms"].values()))
    assert lora["seconds"] > 0 and lora["read_bytes"] > 0 and lora["kv_bytes"] > 0 and lora["passed_over"] > 0
    assert grouping["per_step"][1] < grouping["per_step"][0]
    assert 0 < grouping["saved_share"] < lora["share"]
    text = run_text("explain", books)
    assert "adapters cost" in text and "grouping (--lora-grouping cost) would save" in text
