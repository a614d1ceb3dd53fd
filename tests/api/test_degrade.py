"""Targets and degrading over HTTP: refused with the sum, or answered with less, and the answer says so."""

from __future__ import annotations

import json

import pytest
from server_process import ServerProcess


@pytest.fixture(scope="module")
def server():
    settings = {"max_model_len": 240, "num_blocks": 64, "max_num_seqs": 4, "max_queued_requests": 1}
    running = ServerProcess("-m", "fake_server", json.dumps(settings))
    yield running
    assert running.stop() == 0


def complete(server, **body):
    return server.http.post("/v1/completions", json={"model": "fake", "prompt": "hello", "max_tokens": 3, **body})


def test_fewer_choices_instead_of_a_refusal(server):
    refused = complete(server, n=4)
    assert refused.status_code == 429
    got = complete(server, n=4, degrade=True)
    assert got.status_code == 200, got.text
    answer = got.json()
    assert len(answer["choices"]) == 1
    (cut,) = answer["degraded"]
    assert (cut["field"], cut["asked"], cut["given"]) == ("n", 4, 1)
    assert "the limit is 1 (--max-queued-requests)" in cut["reason"]


def test_what_the_context_has_no_room_for_is_reported(server):
    answer = complete(server, max_tokens=500, degrade=True).json()
    (cut,) = answer["degraded"]
    assert (cut["field"], cut["asked"], cut["given"]) == ("max_tokens", 500, 235)
    assert answer["usage"]["completion_tokens"] == 235
    assert "degraded" not in complete(server, degrade=True).json()


def test_streams_say_it_too(server):
    response = complete(server, stream=True, n=2, degrade=True)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert all(chunk["degraded"][0]["given"] == 1 for chunk in chunks)


@pytest.mark.parametrize("value", [0, -1, "soon", True])
def test_a_target_must_be_a_time(server, value):
    response = complete(server, ttft_target_ms=value)
    assert response.status_code == 400
    assert "ttft_target_ms" in response.text
