"""What clients, engines and signals do wrong, against a server with a fake executor."""

import contextlib
import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest
from fake_engine import STEP_FAILS
from server_process import ServerProcess

ROOMY = {"step_seconds": 0.01, "max_model_len": 512, "num_blocks": 1025, "max_num_seqs": 4, "max_queued_requests": 6}


@pytest.fixture(scope="module")
def server():
    running = ServerProcess("-m", "fake_server", json.dumps(ROOMY))
    yield running
    running.stop()


@pytest.fixture
def own_server():
    """For tests that end the server."""
    running = ServerProcess(
        "-m", "fake_server", json.dumps(ROOMY), "--options", json.dumps({"shutdown_timeout": 1, "engine_restarts": 0})
    )
    yield running
    running.stop(signal.SIGKILL)


def stream(server, prompt, max_tokens=500):
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
    return server.http.stream("POST", "/v1/completions", json=body)


def events(response):
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def first_event(response):
    # httpx closes a response whose iterator is collected, so the iterator lives as long as the response.
    response.kept_open = response.iter_lines()
    return next(line for line in response.kept_open if line)


BAD = [
    ({"prompt": "a", "frobnicate": 1}, 400, "frobnicate"),
    ({"prompt": "a", "stream_options": {"include_usage": True, "x": 1}, "stream": True}, 400, "stream_options.x"),
    ({}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": 7}, 400, "prompt"),
    ({"prompt": [1, 256]}, 400, "prompt"),
    ({"prompt": [1, -1]}, 400, "prompt"),
    ({"prompt": [1, 2**70]}, 400, "prompt"),
    ({"prompt": "a" * 512}, 400, "prompt"),
    ({"prompt": "a" * 100_000}, 400, "prompt"),
    ({"prompt": "a", "n": 0}, 400, "n"),
    ({"prompt": "a", "n": 129}, 400, "n"),
    ({"prompt": ["a"] * 100, "n": 3}, 400, "n"),
    ({"prompt": "a", "n": "2"}, 400, "n"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": -5}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"prompt": "a", "top_k": -2}, 400, "top_k"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "stop": [""]}, 400, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    ({"prompt": "a", "stop_token_ids": [256]}, 400, "stop_token_ids"),
    ({"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9": 101}}, 400, "logit_bias"),
    ({"prompt": "a", "priority": 3}, 400, "priority"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "a", "response_format": {"type": "json"}}, 400, "response_format.type"),
    ({"prompt": "a", "model": "gpt-nope"}, 404, "model"),
    ([1, 2], 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_a_bad_body_is_refused_by_name(server, body, status, param):
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["message"]
    assert len(answer.content) < 2000, "an error does not repeat what was sent"


CHAT_BAD = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "mood": "y"}]}, "messages.0.mood"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("body", "param"), CHAT_BAD, ids=[str(i) for i in range(len(CHAT_BAD))])
def test_a_bad_chat_body_is_refused_by_name(server, body, param):
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b'{"prompt": "a", "temperature": NaN}', b"[" * 5000])
def test_a_body_that_is_no_good_json(server, raw):
    answer = server.http.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_above_the_limit_is_413(server):
    answer = server.http.post("/v1/completions", content=b" " * (33 << 20))
    assert answer.status_code == 413

    def chunks():
        for _ in range(33):
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.WriteError):  # the server stopped reading and closed, which is as good
        assert server.http.post("/v1/completions", content=chunks()).status_code == 413


def test_unknown_paths_and_methods_have_the_same_error_body(server):
    assert server.http.get("/v1/nothing").json()["error"]["message"]
    assert server.http.get("/v1/completions").status_code == 405


def test_a_full_queue_is_429_with_retry_after(server):
    open_streams = [stream(server, f"q{i}") for i in range(10)]
    entered = [context.__enter__() for context in open_streams]
    assert [response.status_code for response in entered] == [200] * 10
    server.until("num_requests_waiting", 6)
    answer = server.http.post("/v1/completions", json={"prompt": "late"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "6" in answer.json()["error"]["message"]
    for context in open_streams:
        context.__exit__(None, None, None)
    server.assert_all_free()


def test_a_disconnect_frees_the_request_in_every_state(server):
    running = [stream(server, f"r{i}") for i in range(4)]
    for context in running:
        first_event(context.__enter__())
    server.until("num_requests_running", 4)
    # Waiting: it has sent nothing yet, so only the disconnect itself can tell.
    waiting = stream(server, "w")
    waiting.__enter__()
    server.until("num_requests_waiting", 1)
    waiting.__exit__(None, None, None)
    server.until("num_requests_waiting", 0)
    for context in running:
        context.__exit__(None, None, None)
    server.assert_all_free()
    # Not streamed: the answer has not begun.
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json={"prompt": "long", "max_tokens": 400}, timeout=0.3)
    server.assert_all_free()


def test_n_siblings_are_all_aborted_on_disconnect(server):
    body = {"prompt": "abc", "max_tokens": 400, "n": 4, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        first_event(response)
        server.until("num_requests_running", 4)
    server.assert_all_free()


def test_a_failed_step_fails_its_request_alone(server):
    failed_before = server.gauge("num_failed_steps_total")
    answer = server.http.post("/v1/completions", json={"prompt": [1, STEP_FAILS]})
    assert answer.status_code == 500
    assert "kernel exploded" in answer.json()["error"]["message"]
    with stream(server, [1, STEP_FAILS]) as response:
        lines = events(response)
    assert "kernel exploded" in json.loads(lines[-1])["error"]["message"]
    assert "[DONE]" not in lines
    assert server.gauge("num_failed_steps_total") == failed_before + 2
    assert server.http.post("/v1/completions", json={"prompt": "ok"}).status_code == 200
    server.assert_all_free()


def test_a_reader_that_does_not_read_harms_nobody(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": "slow", "max_tokens": 500, "stream": True})
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        lazy.sendall((head + body).encode())
        server.until("num_requests_running", 1)
        # Its request ends in the engine although nobody reads, and others are answered meanwhile.
        assert server.http.post("/v1/completions", json={"prompt": "quick"}).status_code == 200
        server.assert_all_free()
        received = b""
        while b"[DONE]" not in received:
            part = lazy.recv(1 << 16)
            assert part, "closed before the end"
            received += part
    text = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in received.decode().splitlines()
        if line.startswith("data: {")
    )
    assert len(text) == 500


def test_the_engines_death_reaches_every_open_stream(own_server):
    open_streams = [stream(own_server, f"d{i}") for i in range(6)]
    entered = [context.__enter__() for context in open_streams]
    first_event(entered[0])
    os.kill(own_server.engine_pid(), signal.SIGKILL)
    killed = time.monotonic()
    for response in entered[1:]:
        assert json.loads(events(response)[-1])["error"]["type"] == "service_unavailable_error"
    assert time.monotonic() - killed < 10
    for context in open_streams:
        context.__exit__(None, None, None)
    health = own_server.http.get("/health")
    assert health.status_code == 503
    assert "SIGKILL" in health.text
    assert own_server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert own_server.stop() == 0


def test_sigterm_drains_and_refuses_meanwhile(own_server):
    collected = []

    def read():
        with stream(own_server, "drain", max_tokens=60) as response:
            collected.extend(events(response))

    # A connection that is open when the drain begins.
    assert own_server.http.get("/health").status_code == 200
    reader = threading.Thread(target=read)
    reader.start()
    own_server.until("num_requests_running", 1)
    own_server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while own_server.http.get("/health").status_code != 503:
        assert time.monotonic() < deadline
    refused = own_server.http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    reader.join(30)
    assert collected[-1] == "[DONE]"
    assert json.loads(collected[-2])["choices"][0]["finish_reason"] == "length"
    assert own_server.process.wait(30) == 0


def test_what_outlives_the_shutdown_timeout_gets_an_error_chunk(own_server):
    with stream(own_server, "endless", max_tokens=480) as response:
        lines = response.iter_lines()
        next(lines)
        own_server.process.send_signal(signal.SIGINT)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert "shut down" in json.loads(rest[-1])["error"]["message"]
    assert own_server.process.wait(30) == 0


def test_a_second_signal_ends_at_once(own_server):
    with stream(own_server, "endless", max_tokens=480) as response:
        first_event(response)
        own_server.process.send_signal(signal.SIGINT)
        own_server.process.send_signal(signal.SIGTERM)
        assert own_server.process.wait(30) is not None
