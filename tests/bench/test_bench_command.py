"""``foliolm bench`` against servers that behave, stall, lie, refuse and break off."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys

import pytest
from scripted_server import ScriptedServer, event, stream, whole
from typer.testing import CliRunner

from foliolm.bench.prompts import Contents
from foliolm.cli.bench import _probe_once
from foliolm.cli.main import build_app
from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import Item
from support.cli import refusal, run_json, run_text

KEYS = (
    *("requests", "simulated_s", "wall_s", "steps", "ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"),
    *("output_tokens_per_s", "requests_per_s", "prefix_hit_ratio", "preemptions", "recomputed_tokens", "kv_usage"),
    *("refused", "bound", "waiting_share", "busy_share", "interrupted"),
)


def bench(url, *words, code=0, **flags):
    options = [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    result = CliRunner().invoke(build_app("bench"), ["bench", url, *map(str, words), *options, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout), result.stderr


def test_the_keys_are_those_of_a_simulated_run_and_every_request_is_counted():
    with ScriptedServer() as server:
        said, _ = bench(server.url, rate=200, requests=30, input_len="lognormal:40:1", output_len="uniform:1:9")
        bodies = server.bodies[1:]
    simulated = run_json(
        *("simulate", "--model", "qwen3-0.6b", "--device", "h100-sxm", "--rate", 200, "--requests", 30),
        *("--input-len", "lognormal:40:1", "--output-len", "uniform:1:9"),
    )
    assert set(simulated) == set(KEYS)
    assert set(KEYS) <= set(said)
    assert said["requests"] == 30
    assert said["output_tokens"] == said["output_tokens_asked"] == sum(body["max_tokens"] for body in bodies)
    assert said["prompt_tokens"] == sum(len(body["prompt"]) for body in bodies)
    for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert list(said[key]) == list(simulated[key])
        assert 0 <= said[key]["p50"] <= said[key]["p99"]
    assert said["ttft_s"]["p50"] <= said["e2e_s"]["p50"]
    assert said["steps"] is said["kv_usage"]["max"] is said["queue_s"]["p50"] is None
    assert (said["failed"], said["errors"], said["checks"]) == (0, {}, {})
    assert all(1000 <= token < 30000 for body in bodies for token in body["prompt"])


def test_a_server_that_stalls_delays_nobody_else_and_is_charged_with_its_stall(tmp_path):
    """The first answer waits until all other requests have come: a client that waited for it would never end."""

    async def behave(server, number, body, send):
        if len(server.bodies) == 21:
            server.all_there.set()
        if number == 1:
            await server.all_there.wait()
        await stream(send, body)

    trace = tmp_path / "sent.jsonl"
    with ScriptedServer(behave) as server:
        said, _ = bench(server.url, rate=100, requests=20, input_len=8, output_len=3, timeout=60, record=trace)
    assert said["requests"] == 20
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert rows[0]["ttft_s"] > rows[-1]["time_s"] - rows[0]["time_s"] > 0
    assert said["client"]["most_in_flight"] >= 2


def test_latency_counts_from_when_a_request_was_due():
    """All at once over a server that takes one after another: the last waited for all."""

    async def behave(server, number, body, send):
        async with server.__dict__.setdefault("turn", asyncio.Lock()):
            await asyncio.sleep(0.01)
            await stream(send, body)

    with ScriptedServer(behave) as server:
        said, _ = bench(server.url, rate="inf", requests=20, input_len=8, output_len=2)
    assert said["ttft_s"]["p99"] > 0.19  # twenty sleeps of at least 0.01 s


def test_a_closed_loop_never_passes_its_concurrency_and_uses_connections_again():
    async def behave(server, number, body, send):
        await asyncio.sleep(0.002)
        await stream(send, body)

    with ScriptedServer(behave) as server:
        said, _ = bench(server.url, concurrency=4, requests=40, input_len=8, output_len=3)
        assert server.most_running == said["client"]["most_in_flight"] == 4
        assert said["requests"] == 40
        assert server.connections <= 2 + 5


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        ({"claimed": 9}, "usage_completion"),
        ({"claimed": 1}, "usage_completion"),
        ({"usage": False}, "no_usage"),
        ({"tokens": 2}, "short"),
        ({"tokens": 7}, "long"),
        ({"reason": None}, "finish_reason"),
        ({"done": False}, "no_done"),
    ],
)
@pytest.mark.parametrize("refuses", [(), ("return_token_ids",)])
def test_what_is_received_is_checked(lie, check, refuses):
    async def behave(server, number, body, send):
        await stream(send, body, **(lie if number == 3 else {}))

    with ScriptedServer(behave, refuses=refuses) as server:
        said, err = bench(server.url, code=1, rate=500, requests=6, input_len=8, output_len=5)
    if refuses and check == "usage_completion" and lie["claimed"] > 5:
        check = "long"  # without ids, chunks may hold several tokens: it shows as more than was asked for
    assert said["checks"][check]["count"] == 1
    assert said["checks"][check]["first"].startswith("request ")
    assert said["checks"][check]["first"] in err


def test_a_wrong_count_of_prompt_tokens_is_found():
    async def behave(server, number, body, send):
        await stream(send, {**body, "prompt": body["prompt"][1:]})

    with ScriptedServer(behave) as server:
        said, _ = bench(server.url, code=1, rate=500, requests=3, input_len=8, output_len=2)
    assert said["checks"]["usage_prompt"] == {
        "count": 3,
        "first": "request 1: usage says 7 prompt tokens; 8 were sent",
    }


def test_errors_are_counted_by_kind_with_the_first_message_and_the_exit_code_says_so():
    async def behave(server, number, body, send):
        if number in (2, 5):
            send(whole(429, {"error": {"message": f"the queue is full at {number}"}}))
        elif number == 3:
            send(whole(503, {"detail": "gone"}))
        elif number == 4:
            await stream(send, body, tokens=2, breaks=True)
        elif number == 6:
            send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            event(send, {"error": {"message": "kernel exploded"}})
            send(b"0\r\n\r\n")
        elif number == 7:
            send(whole(200, {"choices": []}))
        elif number == 8:
            send(b"SMTP says hello\r\n\r\n")
        else:
            await stream(send, body)

    with ScriptedServer(behave) as server:
        said, err = bench(server.url, code=1, concurrency=1, requests=10, input_len=8, output_len=4)
    counts = {kind: found["count"] for kind, found in said["errors"].items()}
    ones = ("http_503", "broken_stream", "stream_error", "not_a_stream", "broken_http")
    assert counts == {"http_429": 2, **dict.fromkeys(ones, 1)}
    assert said["errors"]["http_429"]["first"] == "the queue is full at 2"
    assert said["errors"]["http_503"]["first"] == "gone"
    assert said["errors"]["stream_error"]["first"] == "kernel exploded"
    assert (said["requests"], said["failed"], said["refused"]) == (3, 7, 2)
    assert "failed: 2 × http_429" in err


def test_a_server_that_never_answers_costs_its_timeout():
    async def behave(server, number, body, send):
        await (stream(send, body) if number != 2 else asyncio.Event().wait())

    with ScriptedServer(behave) as server:
        said, _ = bench(server.url, code=1, rate=500, requests=4, input_len=8, output_len=2, timeout=3)
    assert said["errors"]["timeout"]["count"] == 1
    assert said["requests"] == 3


def test_plainer_servers_are_asked_in_plainer_words():
    with ScriptedServer(refuses=("ignore_eos", "return_token_ids", "ids")) as server:
        said, err = bench(server.url, rate=500, requests=4, input_len=8, output_len=2)
        assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert said["prompts"] == "text"
    assert "sent as text" in err
    assert "takes no ignore_eos" in err
    with ScriptedServer(refuses=("max_tokens", "max_completion_tokens")) as server:
        assert "takes none of our requests" in refusal(
            "bench", server.url, "--rate", 1, "--input-len", 5, "--output-len", 5, "--endpoint", "chat"
        )


def test_conversations_repeat_the_real_answers():
    flags = {"rate": 50, "sessions": 3, "turns": 3, "system_prompt_len": 32, "input_len": 10, "output_len": 4}
    with ScriptedServer() as server:
        said, _ = bench(server.url, **flags)
        bodies = server.bodies[1:]
    assert said["requests"] == 9
    assert len({tuple(body["prompt"][:32]) for body in bodies}) == 1
    second = [body["prompt"] for body in bodies if len(body["prompt"]) == 32 + 10 + 4 + 10]
    assert len(second) == 3
    firsts = [body["prompt"] for body in bodies if len(body["prompt"]) == 42]
    assert all(prompt[42:46] == [500, 501, 502, 503] and prompt[:42] in firsts for prompt in second)
    with ScriptedServer() as server:
        bench(server.url, **flags, endpoint="chat")
        longest = max((body["messages"] for body in server.bodies[1:]), key=len)
        assert all(body["path"] == "/v1/chat/completions" for body in server.bodies)
    assert [message["role"] for message in longest] == ["system", *("user", "assistant") * 2, "user"]
    assert longest[2]["content"] == " x x x x"


def test_the_recorded_trace_replays_in_simulate(tmp_path):
    trace = tmp_path / "sent.jsonl"
    flags = {"rate": 80, "sessions": 6, "turns": 2, "system_prompt_len": 64, "input_len": 20, "output_len": 5}
    with ScriptedServer() as server:
        said, _ = bench(server.url, **flags, record=trace)
    again = run_json(
        *("simulate", "--model", "qwen3-0.6b", "--device", "h100-sxm", "--trace", trace, "--format", "jsonl")
    )
    assert again["requests"] == said["requests"] == 12
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(row["output_tokens"] for row in rows) == said["output_tokens"]
    assert sum(row["input_tokens"] for row in rows) == said["prompt_tokens"]
    assert again["prefix_hit_ratio"] > 0.3
    # What is recorded is played again, to the same prompts' lengths and sharing.
    with ScriptedServer() as server:
        replayed, _ = bench(server.url, trace=trace, format="jsonl", time_scale=0.1)
        heads = {tuple(body["prompt"][:64]) for body in server.bodies[1:]}
    assert replayed["prompt_tokens"] == said["prompt_tokens"]
    assert len(heads) == 1


def test_prediction_stands_beside_the_measurement():
    async def behave(server, number, body, send):
        await stream(send, body, pause_s=0.002)

    with ScriptedServer(behave) as server:
        words = ("--predict", "--model", "qwen3-0.6b", "--device", "h100-sxm")
        said, _ = bench(server.url, *words, rate=200, requests=20, input_len=30, output_len=4, seed=5)
        work = ("--rate", 200, "--requests", 5, "--input-len", 9, "--output-len", 3)
        shown = run_text("bench", server.url, *words, *work)
    alone = run_json(
        *("simulate", "--model", "qwen3-0.6b", "--device", "h100-sxm", "--max-model-len", 4096, "--seed", 5),
        *("--rate", 200, "--requests", 20, "--input-len", 30, "--output-len", 4),
    )
    for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "requests", "steps"):
        assert said["predicted"][key] == alone[key]
    off = alone["tpot_s"]["p50"] / said["tpot_s"]["p50"] - 1
    assert said["difference"]["tpot_s"]["p50"] == pytest.approx(off)
    assert "predicted" in shown
    assert "difference" in shown


def test_a_machine_that_was_never_measured_is_measured_for_a_prediction(tmp_path, monkeypatch):
    """By the command that people are told to run; once; and where it fails, nothing is predicted."""
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path))
    ran = []

    def probe(command, exit_code, keep, **_):
        ran.append(command[1:])
        if keep:
            (tmp_path / "device.json").write_text("{}")
        return subprocess.CompletedProcess(command, exit_code)

    monkeypatch.setattr(subprocess, "run", functools.partial(probe, exit_code=1, keep=False))
    with pytest.raises(ConfigError, match="give --device"):
        _probe_once()
    monkeypatch.setattr(subprocess, "run", functools.partial(probe, exit_code=0, keep=True))
    _probe_once()
    _probe_once()
    assert ran == [["-m", "foliolm", "probe"]] * 2


def test_ctrl_c_prints_what_is_done(tmp_path):
    done = tmp_path / "sent.jsonl"

    async def behave(server, number, body, send):
        if number == 4:
            os.kill(process.pid, signal.SIGINT)
            await asyncio.Event().wait()
        await stream(send, body)

    with ScriptedServer(behave) as server:
        words = ["--concurrency", "1", "--requests", "9", "--input-len", "8", "--output-len", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "foliolm", "bench", server.url, *words, "--record", str(done), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    said = json.loads(out)
    assert (said["requests"], said["unfinished"], said["interrupted"]) == (3, 1, True)
    assert len(done.read_text().splitlines()) == 3


def test_a_client_that_is_too_slow_says_so(monkeypatch):
    """A progress callback that takes its time stands for a client without a core."""
    import time
    from contextlib import contextmanager

    from foliolm.cli.benching import progress

    @contextmanager
    def slow(total):
        yield lambda *_: time.sleep(0.03)

    monkeypatch.setattr(progress, "progress", slow)
    with ScriptedServer() as server:
        said, err = bench(server.url, rate=300, requests=30, input_len=8, output_len=2)
    assert said["bound"] == "client"
    assert said["client"]["bottleneck"]
    assert "the client is the bottleneck: requests were sent" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:9", "--rate", 1), "--input-len"),
        (("http://127.0.0.1:9", "--rate", 1, "--input-len", 5, "--output-len", 5), "does not answer"),
        (("ftp://x", "--rate", 1, "--input-len", 5, "--output-len", 5), "ftp://x"),
        (("http://127.0.0.1:9", "--rate", 1, "--model", "qwen3-8b"), "--predict"),
        (("http://127.0.0.1:9", "--rate", 1, "--endpoint", "embeddings"), "embeddings"),
        (("http://127.0.0.1:9", "--rate", 1, "--token-ids", "9:3"), "9:3"),
        (("http://127.0.0.1:9", "--trace", "none.csv", "--format", "azure"), "none.csv"),
        (("http://x", "--rate", 1, "--input-len", 5, "--output-len", 5, "--record", "/proc/x/y"), "--record"),
    ],
)
def test_wrong_input_is_one_sentence(words, said):
    assert said in refusal("bench", *words)


def test_numbers_are_printed_whatever_fails_after_them(monkeypatch, tmp_path):
    def fails(*_):
        raise ConfigError("the disk is full")

    monkeypatch.setattr("foliolm.bench.record.write_record", fails)
    with ScriptedServer() as server:
        said, err = bench(
            server.url, code=1, rate=500, requests=3, input_len=8, output_len=2, record=tmp_path / "sent.jsonl"
        )
    assert said["requests"] == 3
    assert "the disk is full" in err


def test_a_trace_that_goes_wrong_later_on_ends_the_run_with_its_numbers(tmp_path):
    from foliolm.bench.play import AHEAD_REQUESTS

    trace = tmp_path / "bad.jsonl"
    good = [json.dumps({"time_s": n / 1000, "input_tokens": 4, "output_tokens": 1}) for n in range(AHEAD_REQUESTS + 5)]
    trace.write_text("\n".join([*good, '{"time_s": 9, "input_tokens": "many"}']))
    with ScriptedServer() as server:
        said, err = bench(server.url, code=1, trace=trace, format="jsonl")
    assert said["requests"] == len(good)
    assert "input_tokens" in said["broken_off"]
    assert "could not be read to its end" in err


def test_prompts_share_exactly_what_contents_share():
    contents = Contents(3, 1000, 30000)
    one = Item(0, 40, 4, ((7, 16), (8, 16)))
    other = Item(0, 60, 4, ((7, 16), (9, 16)))
    a, b = contents.units(one, 1, 40), contents.units(other, 2, 60)
    assert a[:16] == b[:16]
    assert sum(x == y for x, y in zip(a[16:], b[16:], strict=False)) <= 2
    assert contents.units(one, 1, 40) == a
    assert contents.units(one, 3, 40)[:32] == a[:32] != Contents(4, 1000, 30000).units(one, 1, 40)[:32]
    assert contents.units(one, 3, 40)[32:] != a[32:]
    assert len(set(contents.units(Item(0, 5000, 1), 5, 5000))) > 4000
