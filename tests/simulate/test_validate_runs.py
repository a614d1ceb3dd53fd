"""Measured kernels as step times, and measured runs again in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foliolm.cli.validate import plan_of
from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import account
from foliolm.ledger.interpolation import Curve, Grid
from foliolm.ledger.kernel_cost import HostTimes, KernelCost
from foliolm.ledger.kernel_tables import read_kernel_tables
from foliolm.ledger.step_cost import step_cost
from foliolm.shape.presets import device_preset, model_preset
from foliolm.simulate.measured_run import read_measured_run
from foliolm.simulate.profiles import device_of_folder, find_profile
from foliolm.simulate.validate import Fitted, calibrate_first, compare, replay
from support.cli import refusal, run_json

SHARED = Path(__file__).parents[2] / ".." / "shared" / "measured"
SHAPE = model_preset("qwen3-0.6b").shape
LAYERS = SHAPE.num_layers


def write_profile(root, device="H100", model="Qwen3-0.6B", parallel=1):
    """Kernels that cost 1 µs a token a layer, and attention in round numbers."""
    folder = root / device / "Qwen" / model / "bf16" / f"tp{parallel}"
    folder.mkdir(parents=True)
    dense = ["layer,tokens,time_us"]
    for name in ("embedding", "final_layernorm", "layernorm", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        dense += [f"{name},{tokens},{5 + tokens / 10}" for tokens in (1, 16, 512, 2048)]
    (folder / "dense.csv").write_text("\n".join(dense) + "\n")
    heads = [f"lm_head,{n},{40 + n}" for n in (1, 64)] + [f"sampler,{n},{n}" for n in (1, 64)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]) + "\n")
    attention = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    chunks, cached, rows, contexts = (16, 512, 2048), (0, 1024), (1, 8, 64), (16, 1024, 4096)
    for n in rows:
        attention += [f"0,0,{n},{kv},{n * kv / 1000}" for kv in contexts]
    for p in chunks:
        for c in cached:
            attention.append(f"{p},{c},0,0,{2 + p / 100 + c / 1000}")
            attention += [f"{p},{c},{n},{kv},{2 + p / 100 + c / 1000 + n * kv / 500}" for n in rows for kv in contexts]
    (folder / "attention.csv").write_text("\n".join(attention) + "\n")
    return folder


def kernel_cost(folder, host=None):
    cost = step_cost(account(SHAPE), device_preset("h100-sxm"))
    return KernelCost(read_kernel_tables(folder), SHAPE, cost, host)


def test_tables_are_read_between_and_beyond_their_points():
    curve = Curve({1: 10.0, 11: 20.0, 21: 50.0})
    assert [curve(x) for x in (0, 1, 6, 16, 31)] == [10, 10, 15, 35, 80]
    assert Curve({1: 5.0, 2: 3.0})(9) == 3
    grid = Grid([[0, 10], [0, 100]], [0.0, 100.0, 10.0, 110.0])
    assert [grid(0, 0), grid(5, 0), grid(5, 50), grid(20, 100), grid(-3, -3)] == [0, 5, 55, 120, 0]


def test_a_step_is_the_sum_of_its_kernels(tmp_path):
    cost = kernel_cost(write_profile(tmp_path))
    linear = 5 + 16 / 10
    dense = (2 * linear + 6 * LAYERS * linear) * 1e-6
    assert cost.linears(16) == pytest.approx(dense)
    sampled = (40 + 8 + 8) * 1e-6
    even = cost.steady_seconds(8, 8 * 1024, 1024)
    attention = LAYERS * 8 * 1024 / 1000 * 1e-6
    eight = (2 + 6 * LAYERS) * (5 + 8 / 10) * 1e-6
    assert even == pytest.approx(eight + sampled + attention)
    # One long context among short ones takes more than their mean: the measured share for eight rows.
    assert cost.steady_seconds(8, 8 * 1024, 4096) == pytest.approx(even + 0.052 * 3 * attention)


def test_decodes_beside_a_chunk_have_rows_of_their_own(tmp_path):
    cost = kernel_cost(write_profile(tmp_path))
    alone = cost.attention(8, 8 * 1024, 1024, []) + cost.attention(0, 0, 0, [(512, 0)])
    beside = cost.attention(8, 8 * 1024, 1024, [(512, 0)])
    assert beside == pytest.approx((2 + 5.12 + 8 * 1024 / 500) * 1e-6)
    assert beside > 1.5 * alone
    two = cost.attention(8, 8 * 1024, 1024, [(512, 0), (512, 1024)])
    launch = (2 + 0.16) * 1e-6
    largest = (2 + 5.12 + 1.024 + 8 * 1024 / 500) * 1e-6
    assert two == pytest.approx(largest + (2 + 5.12) * 1e-6 - launch)


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("dense.csv", "qkv_proj,x,5", "tokens is 'x'"),
        ("attention.csv", "16,0,8,16,-1", "time_us is '-1'"),
        ("per_sequence.csv", None, "cannot be read"),
        ("skew.csv", "regime,n,t_mean_us,t_max_us,t_skew_us\nodd,2,1,9,5", "regime is 'odd'"),
    ],
)
def test_damaged_tables_are_named(tmp_path, file, line, said):
    folder = write_profile(tmp_path)
    path = folder / file
    if line is None:
        path.unlink()
    else:
        path.write_text((path.read_text() if path.exists() else "") + line + "\n")
    with pytest.raises(ConfigError, match=said):
        read_kernel_tables(folder)


def test_a_grid_with_holes_is_refused(tmp_path):
    folder = write_profile(tmp_path)
    path = folder / "attention.csv"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if line != "512,0,8,1024,23.504"))
    with pytest.raises(ConfigError, match="a chunk beside decodes"):
        read_kernel_tables(folder)


def test_a_profile_is_found_by_gpu_model_and_parallelism(tmp_path):
    folder = write_profile(tmp_path)
    assert find_profile(tmp_path, "h100-sxm", SHAPE, 1).folder == folder
    with pytest.raises(ConfigError, match=r"no profile of Qwen/Qwen3-0\.6B on a10"):
        find_profile(tmp_path, "a10", SHAPE, 1)
    with pytest.raises(ConfigError, match="tensor parallelism 2"):
        find_profile(tmp_path, "h100-sxm", SHAPE, 2)


def write_run(root, host, cold_s=0.0, blocks=4000):
    """A run of this scheduler with known host times, as if vLLM had been measured."""
    folder = root / "runs" / "H100" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    engine = {"model": "Qwen/Qwen3-0.6B", "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 4096}
    meta = {"model": "Qwen/Qwen3-0.6B", "vllm_version": "0.19.0", "engine_kwargs": engine}
    meta["kv_cache"] = {"num_gpu_blocks": blocks, "block_size": 16}
    (folder / "meta.json").write_text(json.dumps(meta))
    stamps = ("queued_ts", "first_token_ts", "last_token_ts")

    def write(times):
        lines = []
        for i in range(40):
            name, at = f"r{i}", 1e9 + 0.02 * i
            first, last = times.get(name, (0.5, 1.0))
            row = {"request_id": name, "input_toks": 100 + 37 * i % 300, "output_toks": 40 + 11 * i % 60}
            values = (0.0, first, last)
            lines.append({**row, "arrival_time": at, **{s: at - 9e8 + v for s, v in zip(stamps, values, strict=True)}})
        (folder / "requests.jsonl").write_text("\n".join(json.dumps(line) for line in lines))

    write({})
    run = read_measured_run(folder)
    plan, _ = plan_of(run, root / "kernels", None, None)
    until = max(item.time_ns for item in run.items[:8]) + 1
    truth = replay(plan, Fitted(host, cold_s, until, 8)).times
    write({name: (one.ttft, one.latency) for name, one in truth.items()})
    return folder


def test_host_times_are_found_from_a_runs_beginning(tmp_path):
    write_profile(tmp_path / "kernels")
    host = HostTimes(step_s=3e-3, sequence_s=6e-5)
    folder = write_run(tmp_path, host)
    run = read_measured_run(folder)
    plan, said = plan_of(run, tmp_path / "kernels", None, None)
    assert (plan.settings.num_blocks, plan.settings.max_num_seqs, said) == (4001, 16, ())
    assert run.depth == 1
    labels = [item.label for item in run.items[8:]]
    bare = compare(run, replay(plan).times, labels)
    assert bare["tpot"]["mean_error"] < -0.2
    fitted = calibrate_first(plan, 0.2)
    assert fitted.requests == 8
    again = compare(run, replay(plan, fitted).times, labels)
    for metric in ("ttft", "tpot", "latency"):
        assert abs(again[metric]["mean_error"]) < 0.02
    assert fitted.host.step_s + 12 * fitted.host.sequence_s == pytest.approx(
        host.step_s + 12 * host.sequence_s, rel=0.1
    )
    assert fitted.error_after < 0.1 * fitted.error_before


def test_the_command_prints_every_error(tmp_path):
    write_profile(tmp_path / "kernels")
    folder = write_run(tmp_path, HostTimes())
    said = run_json("validate", folder, "--kernels", tmp_path / "kernels")
    (run,) = said["runs"]
    assert run["name"] == "H100/Qwen3-0.6B"
    assert run["kv_blocks"] == 4000
    for metric in ("ttft", "tpot", "latency"):
        for name in ("mean", "median", "p90", "p95", "p99"):
            assert run[metric][f"{name}_error"] == pytest.approx(0.0, abs=1e-3)
    presets = run_json("validate", folder)["runs"][0]
    assert presets["kernels"] is None
    assert "--calibrate-first" in refusal("validate", folder, "--calibrate-first", 0.2)
    (folder / "meta.json").write_text("{}")
    assert "'model' is missing" in refusal("validate", folder)


def test_against_a_measured_run_of_vllm():
    """Kernel times alone: what the host takes is in no table, so that steps are a little too short."""
    if not SHARED.exists():
        pytest.skip("the shared measurements are not here")
    folder = SHARED / "vllm_runs" / "RTXPRO6000" / "Llama-3.1-8B"
    (run,) = run_json("validate", folder, "--kernels", SHARED / "kernel_profiles")["runs"]
    assert -0.03 < run["tpot"]["mean_error"] < 0
    assert -0.04 < run["latency"]["mean_error"] < 0
    assert -0.08 < run["ttft"]["mean_error"] < 0


def test_a_full_pool_shows_in_what_is_said(tmp_path):
    write_profile(tmp_path / "kernels")
    folder = write_run(tmp_path, HostTimes())
    meta = json.loads((folder / "meta.json").read_text())
    longest = max(
        json.loads(line)["input_toks"] + json.loads(line)["output_toks"]
        for line in (folder / "requests.jsonl").read_text().splitlines()
    )
    meta["kv_cache"]["num_gpu_blocks"] = -(-longest // 16) + 2
    (folder / "meta.json").write_text(json.dumps(meta))
    (run,) = run_json("validate", folder, "--kernels", tmp_path / "kernels")["runs"]
    assert run["kv_peak"] > 0.9
    assert run["preemptions"] > 0
    assert run["recomputed_tokens"] > 0


@pytest.mark.parametrize(
    ("folder", "device"),
    [
        ("H100", "h100-sxm"),
        ("A100", "a100-80g-sxm"),
        ("A100-SXM4-40GB", "a100-40g-sxm"),
        ("A100-PCIE-80GB", "a100-80g-pcie"),
        ("NVIDIA-H100-80GB-HBM3", "h100-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("RTXPRO6000", "rtx-pro-6000-server"),
        ("A100-40GB", None),  # there are two
        ("80GB", None),
        ("GB200", None),
    ],
)
def test_a_gpus_folder_names_a_device(folder, device):
    assert device_of_folder(folder) == device
