"""Where a request's time went, as its client and the ledger get it."""

import json

import pytest
from server_process import ServerProcess

from foliolm.core.timeline import PARTS
from foliolm.ledger.lines import HttpLine, decode_line

SETTINGS = {"step_seconds": 0.01, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    return tmp_path_factory.mktemp("books")


@pytest.fixture(scope="module")
def server(books):
    running = ServerProcess("-m", "fake_server", json.dumps(SETTINGS), "--ledger", str(books))
    yield running
    running.stop()


def check(timings):
    assert sum(timings["parts_ms"].values()) == pytest.approx(timings["total_ms"], abs=1e-3)
    assert {name.partition(":")[0] for name in timings["parts_ms"]} <= set(PARTS)
    assert timings["parts_ms"]["own_decode"] > 24, "five steps of 10 ms, shared by two at the most"
    assert timings["parts_ms"]["http"] > 0


def test_timings_come_where_they_are_asked_for_and_sum_to_the_whole(server):
    body = {"prompt": "abc", "max_tokens": 6}
    plain = server.http.post("/v1/completions", json=body).json()
    assert "timings" not in plain["choices"][0]
    answer = server.http.post("/v1/completions", json={**body, "timings": True, "n": 2}).json()
    for choice in answer["choices"]:
        check(choice["timings"])
    assert any("queue" in name or "others" in name for name in answer["choices"][1]["timings"]["parts_ms"])


def test_a_stream_has_them_in_its_last_chunk(server):
    body = {"prompt": "abcd", "max_tokens": 6, "stream": True, "timings": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert ["timings" in chunk["choices"][0] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    check(chunks[-1]["choices"][0]["timings"])


def test_what_a_stop_string_ended_has_a_whole_and_no_parts(server):
    answer = server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20}).json()["choices"][0]
    body = {"prompt": "abc", "max_tokens": 20, "stop": answer["text"][3:5], "timings": True}
    timings = server.http.post("/v1/completions", json=body).json()["choices"][0]["timings"]
    assert timings["parts_ms"] is None
    assert timings["total_ms"] > 0


def test_the_http_side_writes_a_line_for_each_choice(server, books):
    (path,) = books.glob("http-*.jsonl")
    before = len(path.read_bytes().splitlines())
    server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "n": 2})
    lines = [decode_line(line) for line in path.read_bytes().splitlines()[before:]]
    assert len(lines) == 2
    for line in lines:
        assert isinstance(line, HttpLine)
        stamps = line.stamps
        assert 0 < stamps.arrival_ns < stamps.received_ns < stamps.closed_ns
        assert line.label.startswith("cmpl-")
