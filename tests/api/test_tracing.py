"""OpenTelemetry spans, taken by a collector that reads what a real one would."""

import gzip
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_process import ServerProcess

from foliolm.api.options import ServerOptions
from foliolm.api.tracing import Tracer
from foliolm.core.errors import ConfigError

PATIENCE_S = 60


class Collector:
    """An OTLP/HTTP endpoint that keeps the spans it is sent."""

    def __init__(self):
        spans = self.spans = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.put((self.path, span))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self):
        return self.spans.get(timeout=PATIENCE_S)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector():
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(collector):
    options = json.dumps({"otlp_traces_endpoint": collector.url})
    # The exporter's own variable: batches go out every 100 ms, and not every 5 s.
    running = ServerProcess(
        "-m", "fake_server", json.dumps({"step_seconds": 0.01}), "--options", options, OTEL_BSP_SCHEDULE_DELAY="100"
    )
    yield running
    running.stop()


def values(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_span_for_each_choice_goes_on_in_the_clients_trace_and_its_parts_sum_to_it(server, collector):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"prompt": "abcd", "max_tokens": 6, "n": 2, "request_id": "mine"}
    answer = server.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"})
    assert answer.status_code == 200
    for path, span in (collector.take(), collector.take()):
        assert path == "/v1/traces"
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", trace, parent)
        found = values(span)
        assert found["gen_ai.request.id"].startswith("cmpl-mine")
        assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (4, 6)
        assert found["gen_ai.response.finish_reason"] == "length"
        assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
        whole = (span.end_time_unix_nano - span.start_time_unix_nano) * 1e-9
        parts = sum(value for name, value in found.items() if name.startswith("foliolm.time."))
        assert parts == pytest.approx(whole, abs=1e-6)
        assert found["foliolm.time.own_decode"] > 0


def test_a_request_that_is_given_up_has_a_span_too(server, collector):
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 900, "stream": True}
    ) as got:
        next(got.iter_lines())
    _, span = collector.take()
    assert values(span)["gen_ai.response.finish_reason"] == "abort"


def test_an_endpoint_that_nobody_serves_harms_no_answer():
    options = json.dumps({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"})
    running = ServerProcess("-m", "fake_server", "{}", "--options", options, OTEL_BSP_SCHEDULE_DELAY="50")
    try:
        for _ in range(3):
            assert running.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code == 200
    finally:
        running.stop()


def test_an_endpoint_that_is_no_url_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint is 'localhost:4317'"):
        ServerOptions(otlp_traces_endpoint="localhost:4317")
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Tracer("ftp://x/", "model")
