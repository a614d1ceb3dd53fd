"""``GET /debug/kv`` and ``foliolm kv``: who holds the KV memory."""

import json
import subprocess
import sys
import threading

SHARED = [5000 + 13 * i for i in range(100)]


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "foliolm", "kv", *arguments], capture_output=True, text=True)


def holding(report):
    return [owner for owner in report["owners"] if "held" in owner["label"]]


def test_it_says_who_holds_what_while_siblings_run(real_server):
    body = {
        "model": "smollm2-135m",
        "prompt": SHARED,
        "n": 4,
        "max_tokens": 300,
        "temperature": 1.0,
        "ignore_eos": True,
        "request_id": "held",
    }
    asked = threading.Thread(target=lambda: real_server.http.post("/v1/completions", json=body))
    asked.start()
    real_server.until("num_requests_running", 4)
    report = real_server.http.get("/debug/kv").json()["engines"][0]
    shown = command(real_server.url)
    said = command(real_server.url, "--json")
    real_server.http.post("/abort_requests", json={"request_ids": ["held"]})
    asked.join()

    owners = holding(report)
    assert len(owners) == 4
    for owner in owners:
        assert owner["shared_blocks"] >= 6  # 100 tokens are 6 full blocks, which all of them hold
        assert owner["blocks"] == owner["shared_blocks"] + owner["own_blocks"] == -(-owner["tokens"] // 16)
        assert 0 <= owner["unused_tokens"] <= 15
    assert report["shared"]["blocks"] >= 6
    assert report["shared"]["saved_blocks"] >= 3 * 6
    (group,) = report["groups"]
    assert group["used"] + group["free"] + group["fenced"] == group["total"]
    assert report["waste"]["tokens"] == sum(owner["unused_tokens"] for owner in report["owners"])
    assert report["waste"]["tokens"] <= report["waste"]["bound_tokens"] == 15 * report["num_owners"]
    assert report["hits"]["sources"]["siblings"]["hit_tokens"] >= 3 * 100
    assert any(prefix["token_ids"] == SHARED[:16] for prefix in report["prefixes"])

    assert said.returncode == shown.returncode == 0
    (line,) = said.stdout.splitlines()
    assert len(holding(json.loads(line)["engines"][0])) == 4
    assert "prefixes with most behind them" in shown.stdout
    assert "unused in last blocks" in shown.stdout
    real_server.assert_all_free()
    assert real_server.gauge("kv_unused_tokens") == 0


def test_a_server_that_is_not_there_and_a_wrong_url_are_named():
    assert command("ftp://x").returncode == 2
    gone = command("http://127.0.0.1:9", "--json")
    assert gone.returncode == 1
    assert "does not answer" in gone.stderr
    assert gone.stdout == ""
