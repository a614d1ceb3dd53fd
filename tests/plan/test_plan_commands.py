"""The commands as processes: light, one line of JSON, pictures, help."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from foliolm.cli.plan import COMMANDS, build_app
from foliolm.shape.probed import cache_home
from support.plan_cli import plan, plan_text, refusal

QWEN, H100 = ("--model", "qwen3-8b"), ("--device", "h100-sxm")
CALLS = {
    "read": (*QWEN, *H100),
    "latency": (*QWEN, *H100, "--input-tokens", 1000),
    "paging": ("--lengths", "9,13,5,15", "--sweep"),
    "lora": (*QWEN, *H100),
    "capacity": (*QWEN, *H100, "--sequences", 100),
    "chunk": (*QWEN, *H100, "--prompt", 5000, "--chunk", 512, "--ttft-target-s", 2),
    "swap": (*QWEN, *H100, "--tokens", 1000),
    "step": (*QWEN, *H100, "--decodes", 3, "--prefill", "64:32,10:0"),
    "chat": (*QWEN, *H100, "--users", 10),
}
KEYS = {
    "read": "weight_bytes_per_step kv_bytes_per_token context rows ratio_first_to_last knee_batch floor_bytes",
    "latency": "ttft_s decode_s e2e_s",
    "paging": "reserved paged sweep",
    "lora": "adapter_bytes adapters_bytes kv_bytes binds rows_per_adapter adapter_bytes_per_step",
    "capacity": "memory_bytes weights_bytes activations_bytes reserve_bytes kv_pool_bytes blocks tokens sequences "
    "binds largest_max_model_len",
    "chunk": "worst_gap_s gaps max_chunk_for_target ttft_cost_s",
    "swap": "swap_s recompute_s choose break_even_tokens",
    "step": "total_s terms padding_s",
    "chat": "pool_tokens tokens_per_user_by_turn working_set_tokens hit_ratio users_fit ttft_s itl_s binds levers",
}
HEAVY = {"torch", "transformers", "fastapi", "matplotlib", "scipy", "numpy"}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_has_the_documented_keys_and_text_the_verdict(name):
    numbers = plan(name, *CALLS[name])
    assert set(KEYS[name].split()) <= set(numbers)
    text = " ".join(plan_text(name, *CALLS[name]).split())
    assert " ".join(numbers["verdict"].split()) in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_runs(name):
    result = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(build_app(name), [name, "--help"])
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert f"Example: foliolm plan {name} " in text
    words = text.partition("Example: foliolm plan ")[2].split()
    words = words[: words.index("--plot")] if "--plot" in words else words
    assert plan(*words)


@pytest.mark.parametrize("name", ["capacity", "chat"])
def test_a_command_starts_without_heavy_packages(name):
    code = (
        "import sys\n"
        "from foliolm.cli.main import main\n"
        "try:\n    main()\n"
        f"finally:\n    heavy = {HEAVY!r} & set(sys.modules); print(sorted(heavy), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, "plan", name, *map(str, CALLS[name]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == plan(name, *CALLS[name])


def test_wrong_input_of_the_real_command_exits_with_2():
    command = [sys.executable, "-m", "foliolm", "plan", "read", "--model", "qwen3-8b", "--batch", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "foliolm: batch is 0; it must be from 1 to 1048576\n"


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_the_same_file_each_time(tmp_path, kind):
    pytest.importorskip("matplotlib")
    path, again = tmp_path / f"read.{kind}", tmp_path / f"again.{kind}"
    for target in (path, again):
        plan("read", *QWEN, "--device", "l40s", "--plot", target)
    assert path.read_bytes() == again.read_bytes()
    assert path.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_the_picture_names_knee_floor_and_pool(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    numbers = plan("read", *QWEN, "--device", "l40s", "--plot", tmp_path / "read.png")
    axes = drawn[0].axes[0]
    texts = " | ".join(text.get_text() for text in axes.texts)
    for said in ("knee: batch 51", "floor: KV of 2,048 tokens, 288 MiB", "l40s is full: 82", "b = 64"):
        assert said in texts
    curves = [dict(line.get_xydata().tolist()) for line in axes.lines if len(line.get_xdata()) > 50]
    assert len(curves) == 2  # weights alone, and the total
    for row in numbers["rows"]:
        assert {curve[row["batch"]] for curve in curves} == {row["weight_bytes"], row["total_bytes"]}
    monkeypatch.undo()
    pyplot.close(drawn[0])


def test_a_gguf_file_is_planned_from_its_header():
    files = sorted((cache_home() / "models" / "smollm2-135m").glob("*.gguf"))
    if not files:
        pytest.skip("the embedded model was not pulled")
    numbers = plan("capacity", "--model", files[0], "--device", "cpu-cloud-2vcpu", "--context", 2048)
    # 106,168,320 values of Q4_1, 28,311,552 of Q8_0 (embedding and head, tied), 35,136 of float32.
    assert numbers["weights_bytes"] == 106_168_320 * 20 // 32 + 28_311_552 * 34 // 32 + 35_136 * 4
    assert numbers["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2


def test_a_damaged_gguf_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(8))
    assert "is truncated" in refusal("read", "--model", path)
