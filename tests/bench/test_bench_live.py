"""``foliolm bench`` against this project's own server, whose model is the fake executor, in processes of their own."""

from __future__ import annotations

import json
import signal
import threading

import pytest
from server_process import ServerProcess
from test_bench_command import bench

SETTINGS = {"max_model_len": 400, "num_blocks": 2000, "step_seconds": 0.002, "enable_prefix_caching": True}
IDS = {"token_ids": "32:126"}  # its tokens are bytes


@pytest.fixture(scope="module")
def server():
    running = ServerProcess("-m", "fake_server", json.dumps(SETTINGS))
    yield running
    running.stop()


def test_every_token_is_counted_and_every_claim_holds(server):
    said, _ = bench(server.url, rate=60, requests=25, input_len="uniform:5:60", output_len="uniform:1:20", **IDS)
    assert (said["requests"], said["failed"], said["checks"]) == (25, 0, {})
    assert said["prompts"] == "token_ids"
    assert said["output_tokens"] == said["output_tokens_asked"]
    assert said["prompt_tokens"] == said["prompt_tokens_asked"]
    assert said["model"] == "fake"
    server.assert_all_free()


def test_text_is_what_remains_for_ids_that_the_server_does_not_know(server):
    said, err = bench(server.url, rate=60, requests=5, input_len=10, output_len=5)
    assert said["prompts"] == "text"
    assert "sent as text" in err
    assert (said["requests"], said["checks"]) == (5, {})


def test_conversations_hit_the_server_cache_to_the_block(server):
    """Each turn's prompt repeats the whole blocks of 4 of what was said before, answers included, less the last."""
    flags = {"concurrency": 2, "sessions": 4, "turns": 3, "input_len": 21, "output_len": 10}
    said, _ = bench(server.url, **flags, **IDS, seed=9)
    # 21, 52 and 83 tokens: 31 and 62 were computed before but for the last token sampled, which never was an input.
    assert said["requests"] == 12
    assert said["prefix_hit_ratio"] == pytest.approx((28 + 60) / (21 + 52 + 83))


def test_a_full_queue_is_counted_and_the_exit_code_says_so():
    narrow = {**SETTINGS, "max_num_seqs": 1, "max_queued_requests": 2, "step_seconds": 0.02}
    server = ServerProcess("-m", "fake_server", json.dumps(narrow))
    try:
        said, err = bench(server.url, code=1, rate="inf", requests=12, input_len=20, output_len=5, **IDS)
    finally:
        server.stop()
    assert list(said["errors"]) == ["http_429"]
    assert said["errors"]["http_429"]["count"] == said["refused"] == said["failed"] > 0
    assert said["requests"] + said["failed"] == 12
    assert "http_429" in err


def test_a_server_that_dies_in_the_middle_fails_what_it_held():
    server = ServerProcess("-m", "fake_server", json.dumps({**SETTINGS, "step_seconds": 0.05}))

    def kill():
        server.until("num_requests_running", 3)
        server.process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    said, _ = bench(server.url, code=1, concurrency=3, requests=6, input_len=20, output_len=300, **IDS)
    killer.join()
    server.stop()
    assert said["failed"] == 6
    # A dying process closes the connections first, so that one more may still be opened.
    assert set(said["errors"]) <= {"broken_stream", "connect"}
    assert said["errors"]["broken_stream"]["count"] >= 3
