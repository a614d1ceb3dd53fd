"""Targets and degrading over HTTP: refused with the sum, or answered with less, and the answer says so."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from server_process import ServerProcess

from foliolm.api.service import Service, TooManyTokensError
from foliolm.core.errors import NO_ROOM_IN_POOL, QueueFullError, RequestError, TtftTargetError
from foliolm.core.sampling import SamplingParams


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


def degraded(refuse, degrade=True, **asked):
    """What ``generate`` tries while ``refuse`` says why not, and what the answer says was cut."""
    tried = []

    async def begin(self, body, answer, prompts, sampling, field, arrival_ns):
        tried.append((sampling.n, sampling.max_tokens))
        error = refuse(sampling)
        if error is not None:
            raise error
        return "begun"

    class Patient(Service):
        _begin = begin

        def __init__(self):
            self.model = SimpleNamespace(
                max_model_len=100, room=lambda prompt, most: 100 - prompt if most is None else min(100 - prompt, most)
            )

    answer, body = SimpleNamespace(degraded=[]), SimpleNamespace(degrade=degrade)
    asyncio.run(Patient().generate(body, answer, [[1] * 20], SamplingParams(**asked), "prompt", 0))
    return tried, {cut["field"]: (cut["asked"], cut["given"], cut["reason"]) for cut in answer.degraded}


def test_a_wait_that_is_too_long_costs_choices_and_then_tokens():
    def refuse(sampling):
        return TtftTargetError(f"too late for {sampling.max_tokens}") if sampling.max_tokens > 10 else None

    tried, cuts = degraded(refuse, n=4, max_tokens=40)
    assert tried == [(4, 40), (2, 40), (1, 40), (1, 20), (1, 10)]
    assert cuts == {"n": (4, 1, "too late for 40"), "max_tokens": (40, 10, "too late for 20")}


def test_what_the_pool_cannot_hold_costs_tokens_and_no_choices():
    def refuse(sampling):
        if sampling.max_tokens is None or sampling.max_tokens > 30:
            return RequestError("it can never fit", "max_tokens", NO_ROOM_IN_POOL)
        return None

    tried, cuts = degraded(refuse, n=2)
    assert tried == [(2, None), (2, 40), (2, 20)]
    assert cuts == {"max_tokens": (80, 20, "it can never fit")}


def test_an_answer_is_never_shorter_than_it_must_be():
    with pytest.raises(TooManyTokensError):
        degraded(lambda sampling: TooManyTokensError("no", "n"), n=1, max_tokens=40, min_tokens=30)
    tried: list[int] = []

    def refuse(sampling):
        tried.append(sampling.max_tokens)
        return TtftTargetError("no")

    with pytest.raises(TtftTargetError):
        degraded(refuse, max_tokens=40, min_tokens=30)
    assert tried == [40, 30]


@pytest.mark.parametrize(
    "error", [QueueFullError("full"), RequestError("wrong", "prompt"), RequestError("x", "n", "y")]
)
def test_what_fewer_tokens_cannot_help_is_refused(error):
    with pytest.raises(type(error), match=str(error)):
        degraded(lambda sampling: error, max_tokens=40)
    with pytest.raises(type(error)):
        degraded(lambda sampling: error, degrade=False, n=4, max_tokens=40)
