"""``foliolm generate``: what a line must be; whole lines, no answer twice, the same output after an interruption."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from foliolm.api.batch import BatchOutput, post, read_requests, run_batch, seed_for
from foliolm.core.errors import ConfigError


def line(custom_id="a", url="/v1/completions", **more):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": custom_id}, **more}


def written(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no request"]),
        ("\n\n", ["holds no request"]),
        ("{\n", ["line 1", "not valid JSON"]),
        ("[]\n", ["line 1", "must be a JSON object"]),
        (json.dumps(line()) + "\n" + json.dumps(line()) + "\n", ["line 2", "'a'", "also on line 1"]),
        (json.dumps(line(extra=1)), ["line 1", "'extra'"]),
        (json.dumps(line(custom_id="")), ["custom_id"]),
        (json.dumps(line(custom_id=None)), ["custom_id"]),
        (json.dumps(line(method="GET")), ["method"]),
        (json.dumps(line(url="/v1/embeddings")), ["url", "/v1/chat/completions"]),
        (json.dumps(line(body=[])), ["body"]),
        (json.dumps(line(body={"stream": True})), ["stream"]),
    ],
)
def test_a_wrong_input_is_refused_before_a_model_is_loaded(tmp_path, text, words):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_requests(tmp_path / "in.jsonl")
    assert all(word in str(refused.value) for word in words), refused.value


class EchoApp:
    """Answers with the prompt and the seed; may be busy at first, fail, or hold back."""

    def __init__(self, busy=0, hold=None):
        self.busy, self.hold = busy, hold
        self.seen = []
        self.now = self.most = 0

    async def __call__(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        self.now += 1
        self.most = max(self.most, self.now)
        # Answers come in another order than requests.
        await asyncio.sleep(0.001 * (len(self.seen) * 7 % 5))
        if self.hold is not None and len(self.seen) >= self.hold:
            await asyncio.Event().wait()
        self.now -= 1
        self.seen.append(body["prompt"])
        status = 200
        if self.busy > 0:
            self.busy, status = self.busy - 1, 429
        elif body["prompt"].startswith("bad"):
            status = 400
        answer = {"id": body.get("request_id"), "seed": body.get("seed"), "text": body["prompt"]}
        answer["usage"] = {"completion_tokens": 2}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def run(app, requests, path, seed=0, **options):
    known = frozenset(request.custom_id for request in requests)
    with BatchOutput(path).opened(known, **options) as output:
        return asyncio.run(run_batch(app, requests, output, 4, seed, lambda counts: None))


@pytest.fixture
def requests(tmp_path):
    names = [f"q{i}" for i in range(20)] + ["bad1", "é"]
    return read_requests(written(tmp_path / "in.jsonl", [line(name) for name in names]))


def test_answers_stand_in_the_order_of_their_requests(tmp_path, requests):
    app = EchoApp()
    counts = run(app, requests, tmp_path / "out.jsonl")
    assert (counts.total, counts.done, counts.failed, counts.resumed, counts.output_tokens) == (22, 22, 1, 0, 44)
    assert app.most == 4
    assert app.seen != [request.custom_id for request in requests], "they did come in another order"
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [request.custom_id for request in requests]
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == (400 if answer["custom_id"] == "bad1" else 200)
        assert answer["response"]["body"]["text"] == answer["custom_id"]
        assert answer["response"]["body"]["seed"] == seed_for(0, answer["custom_id"])
    assert len({answer["id"] for answer in answers}) == 22
    assert answers[0]["response"]["request_id"] == "q0"


@pytest.mark.parametrize("after", [0, 1, 7, 21])
def test_an_interrupted_run_is_gone_on_with(tmp_path, requests, after):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(EchoApp(), requests, whole)
    first = EchoApp(hold=after)

    async def interrupted():
        known = frozenset(request.custom_id for request in requests)
        with BatchOutput(path).opened(known) as output:
            task = asyncio.ensure_future(run_batch(first, requests, output, 4, 0, lambda counts: None))
            while len(output.done) < after:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(interrupted())
    assert path.read_bytes().count(b"\n") == after
    assert after == 0 or path.read_bytes().endswith(b"\n")
    second = EchoApp()
    counts = run(second, requests, path)
    assert counts.resumed == after
    assert len(second.seen) == 22 - after
    assert not set(first.seen) & set(second.seen), "nothing is asked twice"
    assert path.read_bytes() == whole.read_bytes()
    assert run(EchoApp(hold=0), requests, path).resumed == 22, "nothing is left to ask"


def test_half_a_line_is_cut_off(tmp_path, requests):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(EchoApp(), requests, whole)
    path.write_bytes(whole.read_bytes()[:-30])
    assert run(EchoApp(), requests, path).resumed == 21
    assert path.read_bytes() == whole.read_bytes()


def test_errors_can_be_asked_again(tmp_path, requests):
    path = tmp_path / "out.jsonl"
    run(EchoApp(), requests, path)
    app = EchoApp()
    assert run(app, requests, path, retry_failed=True).resumed == 21
    assert app.seen == ["bad1"]
    assert path.read_bytes().count(b"\n") == 22


def test_a_server_that_is_busy_is_asked_again(tmp_path, requests, monkeypatch):
    monkeypatch.setattr("foliolm.api.batch.RETRY_S", 0.001)
    counts = run(EchoApp(busy=10), requests, tmp_path / "out.jsonl")
    assert (counts.done, counts.failed) == (22, 1)


@pytest.mark.parametrize("content", ["no json\n", '{"custom_id": "zz", "response": null}\n', '{"a": 1}\n'])
def test_a_file_that_is_something_else_is_left_alone(tmp_path, requests, content):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="another file"):
        run(EchoApp(), requests, path)
    assert path.read_text() == content


def test_two_runs_cannot_write_one_file(tmp_path, requests):
    known = frozenset(request.custom_id for request in requests)
    with (
        BatchOutput(tmp_path / "out.jsonl").opened(known),
        pytest.raises(ConfigError, match="by another run"),
        BatchOutput(tmp_path / "out.jsonl").opened(known),
    ):
        pass


def test_another_seed_is_another_run():
    assert seed_for(0, "a") == seed_for(0, "a")
    assert len({seed_for(s, name) for s in range(3) for name in "abc"}) == 9
    assert all(0 <= seed_for(0, str(i)) < 2**63 for i in range(100))


def test_posting_without_a_server():
    status, body = asyncio.run(post(EchoApp(), "/x", b'{"prompt": "p"}'))
    assert (status, json.loads(body)["text"]) == (200, "p")


def batch_command(*arguments):
    return [sys.executable, "-m", "foliolm", "generate", *map(str, arguments)]


def test_the_command_survives_an_interruption(tmp_path, real_server, lean_flags):
    """Interrupted in the middle and run again, it has the answers that the server gives to the same requests."""
    lines = [
        line(
            f"r{i}",
            body={"prompt": f"{i}, {i + 1}, {i + 2},", "max_tokens": 16, "temperature": i % 2, "ignore_eos": True},
        )
        for i in range(24)
    ]
    lines.append(line("chat", "/v1/chat/completions", body={"messages": [{"role": "user", "content": "Hi"}], "n": 2}))
    lines[-1]["body"] |= {"max_tokens": 8, "seed": 5}
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    running = subprocess.Popen(
        batch_command(source, target, "--concurrency", 3, *lean_flags),
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    said = []
    threading.Thread(target=lambda: said.extend(running.stderr), daemon=True).start()
    deadline = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < deadline, said
        assert running.poll() is None, said
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(60) == 130, said
    half = target.read_bytes()
    answered = half.count(b"\n")
    assert 4 <= answered < 25
    assert half.endswith(b"\n")
    done = subprocess.run(
        batch_command(source, target, "--json", *lean_flags), capture_output=True, text=True, timeout=240, check=True
    )
    counts = json.loads(done.stdout)
    assert (counts["answered"], counts["failed"], counts["resumed"]) == (25, 0, answered)
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [one["custom_id"] for one in lines]
    for one, answer in list(zip(lines, answers, strict=True))[::4]:
        body = {"seed": seed_for(0, one["custom_id"]), **one["body"]}
        from_server = real_server.http.post(one["url"], json=body).json()
        assert answer["response"]["body"]["choices"] == from_server["choices"]
