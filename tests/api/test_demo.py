"""The demo: eight streams through the official client, against a server that it starts and stops."""

import json
import os
import subprocess
import sys


def test_the_demo_answers_all_questions_and_leaves_no_process():
    done = subprocess.run(
        [sys.executable, "-m", "foliolm", "demo", "--json", "--max-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ},
    )
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert len(report["requests"]) == 8
    for answer in report["requests"]:
        assert answer["answer"].strip()
        assert 1 <= answer["tokens"] <= 4
        assert answer["ttft_s"] > 0
        assert answer["tokens_per_s"] > 0
    assert report["output_tokens"] == sum(answer["tokens"] for answer in report["requests"])
    assert report["requests"][0]["answer"].startswith("The capital of France")
    assert done.stderr.rstrip().endswith("stopped")
