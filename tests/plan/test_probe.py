"""The probe measures something real and the planner can use it."""

from __future__ import annotations

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from foliolm.cli.oneline import OneLineCommand
from foliolm.cli.probe import probe
from foliolm.cli.probing.machine import memory_bytes, num_threads
from support.plan_cli import plan, refusal


def run(*words: object):
    app = Typer()
    app.command(cls=OneLineCommand)(probe)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_what_is_measured_becomes_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path))
    words = ("capacity", "--model", "smollm2-135m", "--device", "this-machine", "--context", 512)
    assert "run: foliolm probe" in refusal(*words)
    result = run("--device", "cpu", "--repeats", 1, "--json")
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert json.loads((tmp_path / "device.json").read_text()) == measured
    assert (measured["kind"], measured["confidence"]) == ("cpu", "measured")
    assert 0.2 < measured["bandwidth_gbps"] < 5000
    assert measured["fp32_tflops"] > 0
    assert measured["bf16_tflops_dense"] > 0
    assert measured["memory_reported_mib"] * 2**20 == pytest.approx(memory_bytes())
    assert plan(*words)["memory_bytes"] == memory_bytes()


def test_without_torch_numpy_measures():
    from foliolm.cli.probing.with_numpy import measure

    device = measure(2**26, 1)  # small: the numbers themselves are not looked at
    assert device.fp32_tflops and device.bandwidth_gbps > 0
    assert f"{num_threads()} threads" in device.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size-gib", 0.5), "size_gib is 0.5; it must be at least 1"),
        (("--size-gib", "nan"), "size_gib is nan"),
        (("--repeats", 0), "repeats is 0"),
        (("--device", "tpu"), "device is 'tpu'"),
    ],
)
def test_wrong_input_is_one_line(words, said):
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_nothing_is_kept_where_that_was_asked(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path / "home"))
    assert run("--device", "cpu", "--repeats", 1, "--no-save").exit_code == 0
    assert not (tmp_path / "home").exists()
