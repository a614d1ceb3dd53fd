"""Requests that end early and engines that do, against a server with a fake executor."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest
from fake_engine import PROCESS_DIES, expected
from server_process import ServerProcess

# 63 blocks of 4: two requests of 200 tokens cannot both stay.
TIGHT = {
    "step_seconds": 0.01, "max_model_len": 240, "num_blocks": 64, "max_num_seqs": 2, "max_queued_requests": 40,
    "long_prefill_token_threshold": 32, "max_num_batched_tokens": 64,
}  # fmt: skip
OPTIONS = {"sse_heartbeat": 0.3, "shutdown_timeout": 1, "engine_stuck_timeout": 1.5}


@pytest.fixture(scope="module", params=[0, 1], ids=["depth0", "depth1"])
def server(request):
    running = ServerProcess(
        "-m", "fake_server", json.dumps({**TIGHT, "depth": request.param}), "--options", json.dumps(OPTIONS)
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def own_server():
    running = ServerProcess("-m", "fake_server", json.dumps(TIGHT), "--options", json.dumps(OPTIONS))
    yield running
    running.stop(signal.SIGKILL)


def stream(server, prompt, max_tokens=200, **more):
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **more}
    return server.http.stream("POST", "/v1/completions", json=body)


class Reader(threading.Thread):
    """Reads a stream on a thread of its own; keeps its lines and when each came."""

    def __init__(self, server, prompt, max_tokens=200, **more):
        super().__init__(daemon=True)
        self.lines, self.times, self.headers = [], [], None
        self._context = stream(server, prompt, max_tokens, **more)
        self.begun = threading.Event()
        self.start()

    def run(self):
        with self._context as response:
            self.headers = response.headers
            for line in response.iter_lines():
                if line:
                    self.times.append(time.monotonic())
                    self.lines.append(line)
                    self.begun.set()

    @property
    def events(self):
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    @property
    def comments(self):
        return [line[2:] for line in self.lines if line.startswith(":")]

    @property
    def text(self):
        return "".join(event["choices"][0]["text"] for event in self.events if event.get("choices"))

    def end(self):
        self.join(60)
        assert not self.is_alive()
        return self


def test_a_stream_that_is_preempted_says_so_and_comes_back(server):
    before = server.gauge("num_preemptions_total")
    readers = [Reader(server, letter * 20, 200) for letter in "ab"]
    for reader in readers:
        reader.end()
    assert server.gauge("num_preemptions_total") > before
    assert [len(reader.text) for reader in readers] == [200, 200]
    for letter, reader in zip("ab", readers, strict=True):
        assert reader.text == bytes(expected([ord(letter)] * 20, 200)).decode(), (
            "what was said before is not said again"
        )
    said = [reader.comments for reader in readers if "preempted" in reader.comments]
    assert said, "nobody was told"
    for comments in said:
        assert "resumed" in comments[comments.index("preempted") :]
    assert server.gauge("recomputed_tokens_total") > 0
    server.assert_all_free()


def test_a_stream_that_waits_gets_comments(server):
    running = [Reader(server, [40 + i] * 4, 110) for i in range(2)]
    for reader in running:
        reader.begun.wait(30)
    waiting = Reader(server, "w", 3).end()
    assert "waiting" in waiting.comments
    assert waiting.lines.index(": waiting") < next(i for i, line in enumerate(waiting.lines) if line.startswith("data"))
    gaps = [after - before for before, after in zip(waiting.times, waiting.times[1:], strict=False)]
    assert max(gaps, default=0) < 3, "ten heartbeats"
    for reader in running:
        assert reader.end().lines[-1] == "data: [DONE]"


def test_a_disconnect_frees_who_prefills_who_is_preempted_and_who_is_in_flight(server):
    """The chunks of a long prompt; a request whose memory was taken; a decode with a step in flight (depth 1)."""
    for _ in range(3):
        contexts = [stream(server, "x" * 180, 40), stream(server, "y" * 30, 200), stream(server, "z" * 100, 100)]
        for context in contexts:
            context.__enter__()
        time.sleep(0.15)
        for context in reversed(contexts):
            context.__exit__(None, None, None)
        server.assert_all_free()
    # One that was preempted: both want more than the pool has.
    before = server.gauge("num_preemptions_total")
    contexts = [stream(server, letter * 20, 200) for letter in "ab"]
    for context in contexts:
        context.__enter__()
    deadline = time.monotonic() + 30
    while server.gauge("num_preemptions_total") == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for context in contexts:
        context.__exit__(None, None, None)
    server.assert_all_free()
    assert server.http.get("/load").json()["server_load"] == 0


def test_an_abort_ends_whatever_bears_the_name(server):
    by_body = Reader(server, "a", 150, request_id="mine")
    by_body.begun.wait(30)
    answer = server.http.post("/abort_requests", json={"request_ids": ["mine", "nobody"]})
    assert answer.json() == {"aborted": ["mine"]}
    assert by_body.end().events[-1]["choices"][0]["finish_reason"] == "abort"
    assert by_body.lines[-1] == "data: [DONE]"

    by_answer = Reader(server, "b", 150)
    by_answer.begun.wait(30)
    identifier = by_answer.events[0]["id"]
    assert by_answer.headers["x-request-id"] == identifier
    assert server.http.post("/abort_requests", json={"request_ids": [identifier]}).json() == {"aborted": [identifier]}
    by_answer.end()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(
            server.http.post,
            "/v1/completions",
            json={"prompt": "c", "max_tokens": 150},
            headers={"x-request-id": "from-header"},
        )
        # Not before it has arrived: until then there is nobody of that name, and gauges may still show the one before.
        deadline = time.monotonic() + 30
        names = ["from-header"]
        while server.http.post("/abort_requests", json={"request_ids": names}).json() != {"aborted": names}:
            assert time.monotonic() < deadline, "it never came"
        answer = whole.result(30)
    assert answer.headers["x-request-id"] == "from-header"
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert len(answer.json()["choices"][0]["text"]) < 150
    server.assert_all_free()
    assert server.http.post("/abort_requests", json={}).status_code == 400
    assert server.http.post("/abort_requests", json={"request_ids": ["x"], "y": 1}).json()["error"]["param"] == "y"


def test_a_request_may_say_how_long_it_may_take(server):
    before = server.gauge("requests_timed_out_total")
    answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 230, "timeout": 0.3})
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert "timeout is 0.3 s" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    late = Reader(server, "b", 230, timeout=0.3).end()
    assert 0 < len(late.text) < 230
    assert late.events[-1]["error"]["type"] == "timeout_error"
    assert late.lines[-1] != "data: [DONE]"
    enough = Reader(server, "c", 5, timeout=50.0).end()
    assert enough.lines[-1] == "data: [DONE]"
    server.assert_all_free()
    assert server.gauge("requests_timed_out_total") == before + 2
    for wrong in (0, -1, 1e9, "5"):
        refused = server.http.post("/v1/completions", json={"prompt": "a", "timeout": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "timeout"


def test_twenty_streams_hear_of_a_killed_engine_and_the_next_request_succeeds(own_server):
    readers = [Reader(own_server, [60 + i], 200) for i in range(20)]
    own_server.until("num_requests_waiting", 18)
    engine = own_server.engine_pid()
    killed = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for reader in readers:
        reader.end()
        assert reader.events[-1]["error"]["type"] == "service_unavailable_error"
        assert "SIGKILL" in reader.events[-1]["error"]["message"]
        assert reader.times[-1] - killed < 10
    assert own_server.http.get("/health").json()["status"] in ("restarting", "ok")
    deadline = time.monotonic() + 60
    while own_server.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (engine_now,) = own_server.http.get("/health").json()["engines"]
    assert (engine_now["state"], engine_now["restarts"]) == ("idle", 1)
    assert own_server.engine_pid() != engine
    answer = own_server.http.post("/v1/completions", json={"prompt": [7], "max_tokens": 5})
    assert answer.json()["choices"][0]["text"] == bytes(expected([7], 5)).decode()
    assert own_server.gauge("engine_deaths_total") == own_server.gauge("engine_restarts_total") == 1
    own_server.assert_all_free()
    assert own_server.stop() == 0


def test_while_the_engine_is_away_requests_are_turned_away_with_retry_after(own_server):
    own_server.http.get("/health")
    # Stopped, it neither works nor dies: only its silence tells.
    engine = own_server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    reader = Reader(own_server, "x", 20)
    own_server_states = set()
    deadline = time.monotonic() + 60
    while "ok" not in own_server_states or own_server.http.get("/health").json()["engines"][0]["restarts"] == 0:
        assert time.monotonic() < deadline, own_server_states
        health = own_server.http.get("/health")
        own_server_states.add(health.json()["status"])
        assert (health.status_code == 200) == (health.json()["status"] == "ok")
        if health.json()["status"] == "restarting":
            refused = own_server.http.post("/v1/completions", json={"prompt": "x"})
            if refused.status_code != 200:
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) > 0
        time.sleep(0.05)
    assert "stuck" in own_server_states
    reader.end()
    assert own_server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_client_that_leaves_before_the_engine_has_answered_leaves_nothing(own_server):
    """The engine is held up; the request is not accepted yet, and its client goes."""
    engine = own_server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        for body in ({"stream": True}, {}):
            with pytest.raises(httpx.ReadTimeout):
                own_server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 200, **body}, timeout=0.4)
        deadline = time.monotonic() + 30
        while own_server.http.get("/load").json()["server_load"]:
            assert time.monotonic() < deadline, "the server still holds them while the engine is silent"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was silent for so long that it was killed
            os.kill(engine, signal.SIGCONT)
    own_server.until("request_success_total", 2)
    own_server.assert_all_free()


def test_a_prompt_that_kills_every_engine_does_not_take_the_server_with_it():
    options = {**OPTIONS, "engine_restarts": 2}
    server = ServerProcess("-m", "fake_server", json.dumps(TIGHT), "--options", json.dumps(options))
    try:
        for _ in range(3):
            deadline = time.monotonic() + 60
            while server.http.get("/health").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert server.http.post("/v1/completions", json={"prompt": [1, PROCESS_DIES]}).status_code == 503
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert "exit code 9" in health.json()["engines"][0]["error"]
        assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert server.http.get("/metrics").status_code == 200
        assert server.stop() == 0
    finally:
        server.stop(signal.SIGKILL)


def test_many_slow_readers_block_nobody(server):
    """Their sockets fill up; what they do not read is kept in bounded memory, and others are served meanwhile."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": "s", "max_tokens": 100, "stream": True, "logprobs": 5})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        lazy = []
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect((host, int(port)))
            one.sendall((head + body).encode())
            lazy.append(one)
        assert server.http.post("/v1/completions", json={"prompt": "q", "max_tokens": 3}).status_code == 200
        server.assert_all_free()
        assert server.http.get("/load").json()["num_requests_running"] == 0
        for one in lazy:
            received = b""
            while b"[DONE]" not in received:
                part = one.recv(1 << 16)
                assert part, "closed before the end"
                received += part
    assert server.http.get("/health").status_code == 200
