"""The names that dashboards read, and what their numbers must agree with."""

import json
import re

import httpx
import pytest
from server_process import ServerProcess

HISTOGRAM = ("_bucket", "_count", "_sum")
# Kind by name, without the prefix. A name that was here once stays: dashboards and autoscalers read it.
NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "host_pool_usage_perc": "gauge",
    "swap_out_bytes": "counter",
    "swap_in_bytes": "counter",
    "kv_blocks_idle": "gauge",
    "kv_blocks_shared": "gauge",
    "kv_unused_tokens": "gauge",
    "kv_blocks_copied": "counter",
    "kv_blocks_evicted": "counter",
    "kv_blocks_offloaded": "counter",
    "kv_blocks_loaded": "counter",
    "host_blocks_cached": "gauge",
    "prompt_forked_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "prefix_cache_host_hits": "counter",
    "num_preemptions": "counter",
    "num_failed_steps": "counter",
    "lora_adapter_bytes_read": "counter",
    "lora_adapter_loads": "counter",
    "lora_adapters_held": "gauge",
    "lora_requests_info": "gauge",
    "recomputed_tokens": "counter",
    "engine_deaths": "counter",
    "engine_restarts": "counter",
    "requests_refused": "counter",
    "requests_timed_out": "counter",
    "estimated_read_bytes_per_gpu": "counter",
    "estimated_flops_per_gpu": "counter",
    "forward_seconds": "counter",
    "achieved_read_bytes_per_second": "gauge",
    "achieved_flops_per_second": "gauge",
    "machine_read_bytes_per_second": "gauge",
    "machine_flops_per_second": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "iteration_tokens_total": "histogram",
    "step_seconds": "histogram",
    "step_predicted_seconds": "histogram",
    "step_residual_seconds": "histogram",
    "wait_seconds_by_reason": "counter",
    "preempted_time_seconds": "histogram",
}
# Names that are promised for features which are not there yet: a name may move up once it has numbers.
LATER = {}


@pytest.fixture(scope="module")
def server():
    settings = {
        "max_model_len": 240,
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_queued_requests": 1,
        "step_seconds": 0.005,
    }
    running = ServerProcess("-m", "fake_server", json.dumps(settings))
    yield running
    assert running.stop() == 0


def families(text):
    """Kind and samples by name; refuses what Prometheus would."""
    kinds, helps, samples = {}, set(), {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in helps, f"{name} is described twice"
            helps.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds, f"{name} is declared twice"
            kinds[name] = kind
        else:
            match = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? (\S+)", line)
            assert match, f"no sample: {line!r}"
            samples.setdefault(match[1], []).append((match[2] or "", float(match[3])))
    assert set(kinds) == helps
    return kinds, samples


def scrape(server):
    return families(server.http.get("/metrics").text)


def total(samples, name, label=""):
    return sum(value for labels, value in samples.get(f"foliolm:{name}", []) if label in labels)


def test_the_set_of_names_is_the_list(server):
    kinds, samples = scrape(server)
    ours = {name.removeprefix("foliolm:"): kind for name, kind in kinds.items() if name.startswith("foliolm:")}
    # The client library declares a counter as NAME_total; _created series come beside it.
    ours = {name: kind for name, kind in ours.items() if not name.endswith("_created")}
    found = {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in ours.items()}
    missing = {name: kind for name, kind in NAMES.items() if found.get(name) != kind}
    assert not missing, "names that were there once, and are not, or are of another kind"
    assert not set(LATER) & set(found), "a promised name is there: move it to the list"
    for name, kind in NAMES.items():
        for suffix in HISTOGRAM if kind == "histogram" else ("_total",) if kind == "counter" else ("",):
            # Which reasons there are is the scheduler's to say; a histogram of numbers below zero has no sum.
            if (name, suffix) not in {("wait_seconds_by_reason", "_total"), ("step_residual_seconds", "_sum")}:
                assert f"foliolm:{name}{suffix}" in samples, f"{name}: every series exists from the start"
    for name, rows in samples.items():
        assert not name.startswith("foliolm:") or all('model_name="fake"' in labels for labels, _ in rows)


def test_every_new_name_is_on_the_list(server):
    """So that it is documented, and stays."""
    kinds, _ = scrape(server)
    listed = {f"foliolm:{name}{'_total' if kind == 'counter' else ''}" for name, kind in NAMES.items()}
    unlisted = {name for name in kinds if name.startswith("foliolm:") and not name.endswith("_created")} - listed
    assert not unlisted, "add them to NAMES above and to docs/serving.md"


def test_the_content_type_is_what_scrapers_expect(server):
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_numbers_agree_with_what_clients_saw(server):
    _, before = scrape(server)
    usage = []
    for number in range(10):
        answer = server.http.post("/v1/completions", json={"prompt": f"p{number}", "max_tokens": 3 + number, "n": 1})
        usage.append(answer.json()["usage"])
    refused = server.http.post("/v1/completions", json={"prompt": ""})
    assert refused.status_code == 400
    server.assert_all_free()
    _, after = scrape(server)

    def rise(name, label=""):
        return total(after, name, label) - total(before, name, label)

    generated = sum(one["completion_tokens"] for one in usage)
    prompts = sum(one["prompt_tokens"] for one in usage)
    assert rise("generation_tokens_total") == generated
    assert rise("prompt_tokens_total") == prompts
    assert rise("request_success_total", 'finished_reason="length"') == rise("request_success_total") == 10
    assert rise("requests_refused_total", 'reason="invalid"') == rise("requests_refused_total") == 1
    assert rise("request_generation_tokens_sum") == generated
    assert rise("request_prompt_tokens_sum") == prompts
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert rise(f"{name}_count") == 10, name
    assert rise("inter_token_latency_seconds_count") == generated - 10
    assert rise("iteration_tokens_total_sum") >= generated
    # What a client waits for is made of what the engine reports.
    e2e = rise("e2e_request_latency_seconds_sum")
    parts = rise("request_queue_time_seconds_sum") + rise("request_inference_time_seconds_sum")
    assert 0 < parts <= e2e
    assert rise("time_to_first_token_seconds_sum") <= e2e
    # The books end a wait where the admitting step starts, the queue's histogram where it is planned.
    waits = rise("wait_seconds_by_reason_total")
    assert 0 < waits <= rise("time_to_first_token_seconds_sum"), "nobody was passed over here"


def test_gauges_move_and_return_to_zero(server):
    seen = 0.0
    body = {"prompt": "x" * 100, "max_tokens": 60, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seen = max(seen, server.gauge("kv_cache_usage_perc"))
    assert 0 < seen <= 1
    server.assert_all_free()


def test_refusals_of_a_full_queue_are_counted(server):
    before = server.gauge("requests_refused_total")
    with httpx.Client(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        contexts = [
            http.stream("POST", "/v1/completions", json={"prompt": f"{i}", "max_tokens": 100, "stream": True})
            for i in range(4)
        ]
        for context in contexts:
            context.__enter__()
            server.until("num_requests_waiting", 0)
        queued = http.stream("POST", "/v1/completions", json={"prompt": "q", "max_tokens": 2, "stream": True})
        queued.__enter__()
        answers = [http.post("/v1/completions", json={"prompt": "late"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [429] * 3
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in answers)
        for context in (*contexts, queued):
            context.__exit__(None, None, None)
    assert server.gauge("requests_refused_total") == before + 3
    server.assert_all_free()
