"""``foliolm simulate``: its keys, the same bytes for the same inputs, and runs whose numbers can be worked out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from foliolm.cli.main import build_app
from foliolm.ledger.cost_file import FORMAT, CostFile, save_cost
from foliolm.ledger.plan_cost import Slowdown
from support.books import real_cost
from support.cli import refusal, run_json, run_text

BASE = ("--model", "qwen3-0.6b", "--device", "h100-sxm", "--max-model-len", 4096)
SPREADS = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")


def simulate(*words, **flags):
    return run_json("simulate", *BASE, *words, *[w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", v)])


def test_every_number_that_is_promised_is_there():
    said = simulate(rate=20, requests=60, input_len="lognormal:200:1", output_len="uniform:1:40")
    for key in SPREADS:
        assert list(said[key]) == ["mean", "p50", "p90", "p95", "p99"]
        assert all(value >= 0 for value in said[key].values())
    for key in ("simulated_s", "wall_s", "steps", "output_tokens_per_s", "requests_per_s", "bound"):
        assert said[key]
    for key in ("prefix_hit_ratio", "preemptions", "recomputed_tokens", "refused"):
        assert said[key] == 0
    assert said["requests"] == 60
    assert 0 < said["kv_usage"]["mean"] <= said["kv_usage"]["max"] < 1


def test_same_inputs_and_seed_same_bytes():
    def run(seed):
        said = simulate(rate=50, requests=80, input_len="lognormal:300:1", output_len="uniform:1:60", seed=seed)
        del said["wall_s"]
        return json.dumps(said)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_a_gate_of_four_shows_as_the_bound_and_in_the_waiting_times():
    """Clients of a closed loop beyond the cap wait for each other: 0.5 and 1.5 request times with 8 and with 16."""
    few, many = (
        simulate(concurrency=clients, requests=clients * 40, input_len=64, output_len=50, max_num_seqs=4)
        for clients in (8, 16)
    )
    assert few["bound"] == many["bound"] == "sequences"
    assert many["ttft_s"]["mean"] / few["ttft_s"]["mean"] == pytest.approx(3.0, rel=0.05)
    assert many["output_tokens_per_s"] == pytest.approx(few["output_tokens_per_s"], rel=0.03)


def test_a_thousand_at_once_wait_for_the_queue_that_they_make():
    said = simulate(rate="inf", requests=1000, input_len=16, output_len="uniform:1:358")
    drained = (1000 - 256) / said["requests_per_s"]
    assert said["ttft_s"]["mean"] == pytest.approx(0.744 * drained / 2, rel=0.10)
    # Equal ones come in four waves of 256, 256, 256 and 232, so that the last three wait one, two and three times.
    said = simulate(rate="inf", requests=1000, input_len=16, output_len=179)
    waves = (256 * 1 + 256 * 2 + 232 * 3) / 1000
    assert said["queue_s"]["mean"] == pytest.approx(waves * said["simulated_s"] / 4, rel=0.05)


def test_more_rows_cost_a_little_time_and_bring_much_throughput():
    narrow, wide = (
        simulate(concurrency=32, requests=320, input_len=64, output_len=60, max_num_seqs=n) for n in (16, 32)
    )
    assert 1.0 < wide["tpot_s"]["mean"] / narrow["tpot_s"]["mean"] < 1.5
    assert wide["output_tokens_per_s"] > 1.4 * narrow["output_tokens_per_s"]
    assert wide["queue_s"]["mean"] < narrow["queue_s"]["mean"]


def test_chunking_costs_an_offline_batch_little_and_bounds_the_gaps():
    """A 70B model on eight cards, prompts of 40,000 tokens: the same FLOPs, so no gain is due, and little is lost."""
    big = ("--model", "llama-3.1-70b", "--device", "h100-sxm", "--tensor-parallel-size", 8, "--max-model-len", 45_000)
    work = ("--rate", "inf", "--requests", 20, "--input-len", 40_000, "--output-len", 64)
    chunked = run_json("simulate", *big, *work, "--max-num-batched-tokens", 4096)
    whole = run_json("simulate", *big, *work, "--no-enable-chunked-prefill")
    assert chunked["simulated_s"] == pytest.approx(whole["simulated_s"], rel=0.05)
    assert chunked["itl_s"]["p99"] < 0.5 * whole["itl_s"]["p99"]


def test_conversations_find_what_was_said_before():
    said = simulate(rate=5, sessions=12, turns=4, think_s="exponential:1", input_len=60, output_len=40)
    assert said["requests"] == 48
    assert said["prefix_hit_ratio"] > 0.5
    without = simulate(
        "--no-enable-prefix-caching", rate=5, sessions=12, turns=4, think_s=1, input_len=60, output_len=40
    )
    assert without["prefix_hit_ratio"] == 0


def test_a_small_pool_preempts_and_is_named():
    work = {"rate": "inf", "requests": 40, "input_len": 200, "output_len": 600, "num_gpu_blocks_override": 300}
    said = simulate(**work, preemption_mode="recompute")
    assert said["preemptions"] > 0
    assert said["recomputed_tokens"] > 0
    assert simulate(**work, preemption_mode="swap")["recomputed_tokens"] == 0
    assert said["bound"] == "kv"
    assert said["kv_usage"]["max"] > 0.95


def test_what_never_fits_is_refused_and_counted():
    said = simulate(rate=10, requests=20, input_len=5000, output_len=5)
    assert (said["requests"], said["refused"]) == (0, 20)
    assert said["ttft_s"]["mean"] is None


def test_the_books_are_what_the_engine_writes(tmp_path):
    simulate(rate=20, requests=20, input_len=300, output_len=20, ledger=tmp_path)
    said = run_json("explain", tmp_path, "--no-advice")
    assert len(said["requests"]) == 20


def test_a_calibrations_host_times_and_slowdown_are_in_what_users_feel(tmp_path):
    """Requests far apart: each token is a step of its own."""
    work = {"rate": 0.01, "requests": 20, "input_len": 64, "output_len": 11}

    def said(name, **held):
        cost = real_cost("qwen3-0.6b")
        save_cost(tmp_path / name, CostFile(FORMAT, "made up", 0.0, cost, **held))
        return simulate(cost=tmp_path / name, **work)

    plain = said("plain")
    slow = said("slow", slowdown=Slowdown(decode=2.0, prompt=3.0))
    assert slow["tpot_s"]["p50"] == pytest.approx(2 * plain["tpot_s"]["p50"], rel=1e-6)
    assert slow["ttft_s"]["p50"] == pytest.approx(3 * plain["ttft_s"]["p50"], rel=1e-6)
    late = said("late", delivery_s=0.25, http_s=0.5)
    assert late["ttft_s"]["p50"] == pytest.approx(plain["ttft_s"]["p50"] + 0.75, rel=1e-6)
    assert late["e2e_s"]["p50"] == pytest.approx(plain["e2e_s"]["p50"] + 0.75, rel=1e-6)
    assert late["queue_s"]["p50"] == pytest.approx(plain["queue_s"]["p50"] + 0.5, abs=1e-6)
    assert late["tpot_s"]["p50"] == pytest.approx(plain["tpot_s"]["p50"], rel=1e-6)
    # In a closed loop nobody asks again before the answer is there.
    work = {"concurrency": 1, "requests": 20, "input_len": 64, "output_len": 11}
    assert said("late", delivery_s=0.25)["simulated_s"] == pytest.approx(said("plain")["simulated_s"] + 20 * 0.25)


def test_ways_of_batching_side_by_side(tmp_path):
    words = ("--compare", "static,prefill-first,mixed,chunked", "--plot", tmp_path / "ways.svg")
    said = simulate(*words, rate=100, requests=60, input_len="lognormal:600:1", output_len="uniform:10:90")
    assert list(said["compare"]) == ["static", "prefill-first", "mixed", "chunked"]
    assert said["compare"]["static"]["ttft_s"]["mean"] > 2 * said["compare"]["chunked"]["ttft_s"]["mean"]
    assert len(said["who_pays"]) == 3
    assert "pays:" in said["who_pays"][0]
    assert (tmp_path / "ways.svg").read_text().startswith("<?xml")


def test_pictures_and_a_report(tmp_path):
    simulate(rate=20, requests=20, input_len=300, output_len=20, plot=tmp_path / "run.png", html=tmp_path / "run.html")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "run.html").read_text()
    assert "time to first token" in page
    assert "http" not in page.split("base64")[0]


def test_people_read_a_table_and_a_sentence():
    said = run_text("simulate", *BASE, "--rate", 20, "--requests", 20, "--input-len", 300, "--output-len", 20)
    assert "time to first token" in said
    assert "20 requests in" in said


def test_like_other_engines():
    def at(*words):
        return simulate(*words, rate=60, requests=40, input_len=800, output_len=50)

    ours, vllm, sglang = at(), at("--like", "vllm"), at("--like", "sglang")
    assert vllm["ttft_s"] != ours["ttft_s"]
    assert sglang["itl_s"]["p99"] != vllm["itl_s"]["p99"]
    assert "--like is 'x'" in refusal("simulate", *BASE, "--like", "x", "--rate", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--rate"),
        (("--rate", 1), "--input-len"),
        (("--rate", 1, "--input-len", 5, "--output-len", "x"), "--output-len"),
        (("--rate", 1, "--input-len", 5, "--output-len", 5, "--compare", "fast"), "'fast'"),
        (("--rate", 1, "--input-len", 5, "--output-len", 5, "--plot", "x.gif"), "x.gif"),
        (("--rate", 1, "--input-len", 5, "--output-len", 5, "--kernels", "/nowhere"), "/nowhere"),
        (("--trace", "none.csv", "--format", "azure"), "none.csv"),
    ],
)
def test_wrong_input_is_one_sentence(words, said):
    assert said in refusal("simulate", *BASE, *words)


@pytest.mark.parametrize("flag", ["--deterministic", "--self-calibration", "--enable-lora"])
def test_flags_that_would_change_nothing_here_are_not_taken(flag):
    words = ("simulate", *map(str, BASE), "--rate", "1", "--input-len", "5", "--output-len", "5", "--requests", "1")
    assert CliRunner().invoke(build_app("simulate"), words).exit_code == 0
    assert CliRunner().invoke(build_app("simulate"), [*words, flag]).exit_code == 2


def test_a_model_and_a_device_are_needed():
    assert "--model" in refusal("simulate", "--device", "h100-sxm")
    assert "--device" in refusal("simulate", "--model", "qwen3-8b")


def test_simulating_imports_no_torch():
    code = (
        "import sys; sys.argv = ['foliolm', 'simulate', '--model', 'qwen3-8b', '--device', 'h100-sxm', '--rate', '9',"
        " '--requests', '3', '--input-len', '9', '--output-len', '3', '--json'];"
        "from foliolm.cli.main import build_app; build_app('simulate')(standalone_mode=False);"
        "assert not {'torch', 'transformers', 'pydantic', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
