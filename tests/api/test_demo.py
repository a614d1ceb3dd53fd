"""The demo: eight streams through the official client, against a server that it starts and stops."""

import json
import os
import subprocess
import sys

from support.adapters import write_adapter
from support.cli import refusal
from support.tiny_files import embedded_model


def test_the_demo_answers_all_questions_and_leaves_no_process(tmp_path):
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, embedded_model().shape, rank=4, seed=seed, size=0.5)
    done = subprocess.run(
        [sys.executable, "-m", "foliolm", "demo", "--json", "--max-tokens", "4", "--adapters", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ},
    )
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert len(report["requests"]) == 8
    assert list(report["adapters"]) == ["smollm2-135m", "one", "two"]
    assert len({answer["answer"] for answer in report["adapters"].values()}) == 3
    for answer in report["requests"]:
        assert answer["answer"].strip()
        assert 1 <= answer["tokens"] <= 4
        assert answer["ttft_s"] > 0
        assert answer["tokens_per_s"] > 0
    assert report["output_tokens"] == sum(answer["tokens"] for answer in report["requests"])
    # Of the demo's questions the one whose answer begins surest: each token leads the second by 2 nats and more.
    said = {answer["question"]: answer["answer"] for answer in report["requests"]}
    assert said["What is two plus three?"].startswith("Two plus three")
    assert done.stderr.rstrip().endswith("stopped")


def test_a_folder_without_adapters_is_refused(tmp_path):
    assert "holds no folder with an adapter_config.json" in refusal("demo", "--adapters", tmp_path)
