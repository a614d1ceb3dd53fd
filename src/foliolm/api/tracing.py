"""OpenTelemetry: a span for each choice of a request, with where its time went, sent to an OTLP endpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from foliolm.api.options import check_http_url
from foliolm.api.timings import stamps_of
from foliolm.core.request import FinishReason
from foliolm.core.timeline import with_http
from foliolm.version import __version__

if TYPE_CHECKING:
    from foliolm.api.choice import Choice
    from foliolm.api.generation import Generation

SPAN = "llm_request"
CONTEXT_HEADERS = ("traceparent", "tracestate")
"""Headers by which a client's trace goes on here (W3C Trace Context)."""
Value = str | int | float


class Tracer:
    """Makes the spans and sends them, in a thread of its own and in batches; what an endpoint does not take is dropped.

    Span and attributes bear the names of OpenTelemetry's conventions for generative AI and, where those have none,
    vLLM's (``gen_ai.latency.*``); ``foliolm.time.<part>`` are the exact timeline's parts. All times are seconds.

    Args:
        endpoint: an OTLP/HTTP traces URL, such as ``http://127.0.0.1:4318/v1/traces``.
        model: the served model's name.

    Raises:
        ConfigError: ``endpoint`` is not an HTTP URL.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        check_http_url("--otlp-traces-endpoint", endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "foliolm", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("foliolm", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def finish(self, generation: Generation) -> None:
        """A span for each choice of a generation whose answer has been sent, or was given up."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if generation.before is None:
            return
        now = time.monotonic_ns()
        to_wall = time.time_ns() - now  # spans are stamped in wall-clock time; everything here is monotonic
        context = self._propagator.extract(dict(generation.trace))
        for choice, label in zip(generation.choices, generation.labels, strict=True):
            span = self._tracer.start_span(
                SPAN,
                context,
                SpanKind.SERVER,
                attributes=self._attributes(generation, choice, label, now),
                start_time=generation.before.arrival_ns + to_wall,
            )
            if choice.finish_reason is FinishReason.ERROR:
                span.set_status(Status(StatusCode.ERROR, None if choice.dead is None else str(choice.dead)))
            span.end(now + to_wall)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def _attributes(self, generation: Generation, choice: Choice, label: str, now: int) -> dict[str, Value]:
        assert generation.before is not None
        sampling, arrival_ns = choice.sampling, generation.before.arrival_ns
        attributes: dict[str, Value] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": label,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": len(generation.choices),
            "gen_ai.usage.prompt_tokens": len(choice.prompt_token_ids),
            "gen_ai.usage.completion_tokens": choice.num_tokens,
            "gen_ai.usage.cached_tokens": choice.num_cached_tokens,
            "gen_ai.latency.e2e": (now - arrival_ns) * 1e-9,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if choice.finish_reason is not None:
            attributes["gen_ai.response.finish_reason"] = choice.finish_reason.value
        stamps = choice.stamps
        if stamps is not None:
            if stamps.admitted_ns:
                attributes["gen_ai.latency.time_in_queue"] = (stamps.admitted_ns - stamps.queued_ns) * 1e-9
            if stamps.first_token_ns:
                attributes["gen_ai.latency.time_to_first_token"] = (stamps.first_token_ns - arrival_ns) * 1e-9
            attributes["foliolm.preemptions"] = stamps.num_preemptions
        if choice.timeline is not None:
            whole = with_http(choice.timeline, stamps_of(choice, generation.before, now))
            for name, nanoseconds in whole.parts:
                attributes[f"foliolm.time.{name}"] = nanoseconds * 1e-9
        return attributes


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client's trace, as far as it sent them."""
    return {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
