"""Field cases of kinds b, e and j that concern a server's life: limits, overload, deadlines, leaks, its end."""

import concurrent.futures
import contextlib
import json
import random
import signal
import time

import httpx
import psutil
import pytest
from fake_engine import expected
from server_process import ServerProcess


@contextlib.contextmanager
def fake_server(options=None, **settings):
    server = ServerProcess("-m", "fake_server", json.dumps(settings), "--options", json.dumps(options or {}))
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)


def complete(server, prompt, max_tokens=8, **more):
    return server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, **more})


def test_b1_a_prompt_larger_than_the_pool_is_refused_and_holds_up_nobody():
    """A pool of 1,024 tokens under a context of 4,096, which a server would refuse at its start."""
    with fake_server(block_size=16, num_blocks=65, max_model_len=4096) as server:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            large = pool.submit(complete, server, "x" * 1500)
            small = pool.submit(complete, server, "y" * 20)
            refused, answered = large.result(60), small.result(60)
        assert refused.status_code == 400
        assert "1500" in refused.json()["error"]["message"]
        assert answered.json()["usage"]["completion_tokens"] == 8
        server.assert_all_free()


def test_b7_requests_that_together_overrun_the_pool_all_end_well():
    with fake_server(
        block_size=16, num_blocks=65, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=256
    ) as server:
        prompts = [letter * 400 for letter in "abcd"]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(complete, server, prompt, 300) for prompt in prompts]
            usage = []
            while not all(answer.done() for answer in answers):
                usage.append(server.gauge("kv_cache_usage_perc"))
        assert [answer.result().status_code for answer in answers] == [200] * 4
        for prompt, answer in zip(prompts, answers, strict=True):
            text = answer.result().json()["choices"][0]["text"]
            assert text == bytes(expected(prompt.encode(), 300)).decode()
        assert max(usage) <= 1
        assert server.gauge("num_preemptions_total") + server.gauge("wait_seconds_by_reason_total") > 0
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 1024
        server.assert_all_free()


@pytest.fixture(scope="module")
def long_lived():
    options = {"queue_timeout": 20, "request_timeout": 40}
    with fake_server(
        options, max_model_len=512, num_blocks=2049, max_num_seqs=64, max_num_batched_tokens=2048,
        max_queued_requests=256,
    ) as server:  # fmt: skip
        yield server


def handles(server):
    """Open files and threads of the server's process and its engine's."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
    return sum(each.num_fds() for each in processes), sum(each.num_threads() for each in processes)


def test_b9_j7_nothing_of_a_request_outlives_it(long_lived):
    """Distinct prompts, some with logprobs, some given up: memory, files and threads stay where they were."""
    rng = random.Random(7)
    server = long_lived

    def batch(number):
        prompts = [[rng.randrange(97, 122) for _ in range(rng.randrange(4, 40))] for _ in range(100)]
        body = {"prompt": prompts, "max_tokens": 4, "logprobs": 2 if number % 5 == 0 else None}
        if number % 5 == 1:
            with server.http.stream(
                "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 200}
            ) as some:
                next(some.iter_lines())
        else:
            assert server.http.post("/v1/completions", json=body).status_code == 200

    # The ledger keeps its newest few thousand requests; only once it is full is memory due to stand still.
    for number in range(60):
        batch(number)
    server.assert_all_free()
    memory, (files, threads) = server.memory_bytes(), handles(server)
    for number in range(30):
        batch(number)
    server.assert_all_free()
    assert (server.memory_bytes() - memory) / 3000 < 1024, "a KiB a request"
    assert handles(server)[0] <= files + 2
    assert handles(server)[1] <= threads + 2


def test_j5_random_aborts_and_deadlines_leave_no_trace(long_lived):
    server = long_lived
    before = handles(server)

    def cycle(number):
        rng = random.Random(number)
        body = {"prompt": [97 + number % 26] * rng.randrange(1, 60), "max_tokens": 400, "stream": rng.random() < 0.6}
        how = rng.choice(("leave", "deadline", "abort"))
        if how == "deadline":
            body["timeout"] = rng.uniform(0.001, 0.2)
        if how == "abort":
            body["request_id"] = f"cycle-{number}"
        read_s = rng.uniform(0.005, 0.2) if how == "leave" else 30
        try:
            if how == "abort":
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    running = pool.submit(server.http.post, "/v1/completions", json=body)
                    time.sleep(rng.uniform(0, 0.1))
                    while not running.done():
                        server.http.post("/abort_requests", json={"request_ids": [body["request_id"]]})
                        time.sleep(0.02)
                return running.result().status_code
            return server.http.post("/v1/completions", json=body, timeout=read_s).status_code
        except httpx.ReadTimeout:
            return "left"

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(cycle, range(300)))
    assert set(outcomes) <= {200, 504, "left"}, set(outcomes)
    assert {504, "left"} <= set(outcomes)
    server.assert_all_free()
    assert server.http.get("/load").json()["server_load"] == 0
    assert complete(server, "after").json()["usage"]["completion_tokens"] == 8
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=60)
    after = handles(server)
    assert after[1] <= before[1] + 2
    assert after[0] <= before[0] + 20, "connections that the test itself holds aside"


def test_j4_a_queue_has_an_end():
    """One seat, one place in the queue: two are served, the others hear at once that they are not."""
    with fake_server(step_seconds=0.02, max_num_seqs=1, max_queued_requests=1, max_num_batched_tokens=64) as server:
        body = {"prompt": "long", "max_tokens": 64, "stream": True}
        first = server.http.stream("POST", "/v1/completions", json=body)
        first.__enter__()
        server.until("num_requests_running", 1)
        second = server.http.stream("POST", "/v1/completions", json=body)
        assert second.__enter__().status_code == 200
        refused = [complete(server, "late") for _ in range(4)]
        assert server.gauge("num_requests_running") == 1, "they were refused while the first one ran"
        assert [answer.status_code for answer in refused] == [429] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert server.gauge("requests_refused_total") == 4
        # Who leaves the queue makes room in it at once.
        second.__exit__(None, None, None)
        server.until("num_requests_waiting", 0)
        third = server.http.stream("POST", "/v1/completions", json=body)
        assert third.__enter__().status_code == 200
        for context in (first, third):
            context.__exit__(None, None, None)
        server.assert_all_free()
        assert complete(server, "after").status_code == 200


def test_e18_an_interrupt_ends_the_server_and_its_engine():
    with fake_server({"shutdown_timeout": 0.5}, step_seconds=0.02) as server:
        engine = psutil.Process(server.engine_pid())
        streams = [
            server.http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 120, "stream": True})
            for _ in range(2)
        ]
        lines = []
        for context in streams:
            lines.append(context.__enter__().iter_lines())
            next(lines[-1])
        server.process.send_signal(signal.SIGINT)
        for rest in lines:
            assert "shut down" in [line for line in rest if line][-1]
        assert server.process.wait(60) == 0
        psutil.wait_procs([engine], timeout=30)
        assert not engine.is_running()
        for context in streams:
            context.__exit__(None, None, None)
