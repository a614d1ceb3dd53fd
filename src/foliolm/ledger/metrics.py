"""Prometheus metrics, made from the ledger's records and from what the HTTP process sees of each request.

Names keep vLLM's suffixes under ``foliolm:``, so that dashboards need one word changed. Importing this module needs
``prometheus_client``, which the ``serve`` extra brings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foliolm.core.machine import MachineLimits
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.timeline import RequestTimeline

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REFUSALS = ("invalid", "queue_full", "ttft_target", "timeout", "draining", "engine_dead")

_NS = 1e-9
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 80)
_RESIDUAL_S = tuple(sorted(sign * edge for edge in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0) for sign in (-1, 1)))
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**e) for e in range(15))
_N = (1, 2, 4, 8, 16, 32, 64, 128)


class StatsLike(Protocol):
    """An engine's state: gauges of now, and counters that rise from the engine's start."""

    @property
    def num_running(self) -> int: ...  # noqa: D102
    @property
    def num_waiting(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_total(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_used(self) -> int: ...  # noqa: D102
    @property
    def num_preemptions(self) -> int: ...  # noqa: D102
    @property
    def num_failed_steps(self) -> int: ...  # noqa: D102
    @property
    def recomputed_tokens(self) -> int: ...  # noqa: D102
    @property
    def prefix_cache_queries(self) -> int: ...  # noqa: D102
    @property
    def prefix_cache_hits(self) -> int: ...  # noqa: D102
    @property
    def prefix_cache_host_hits(self) -> int: ...  # noqa: D102
    @property
    def swap_out_bytes(self) -> int: ...  # noqa: D102
    @property
    def swap_in_bytes(self) -> int: ...  # noqa: D102
    @property
    def host_blocks_total(self) -> int: ...  # noqa: D102
    @property
    def host_blocks_used(self) -> int: ...  # noqa: D102
    @property
    def host_blocks_cached(self) -> int: ...  # noqa: D102
    @property
    def prompt_forked_tokens(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_copied(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_evicted(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_offloaded(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_loaded(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_idle(self) -> int: ...  # noqa: D102
    @property
    def kv_blocks_shared(self) -> int: ...  # noqa: D102
    @property
    def kv_unused_tokens(self) -> int: ...  # noqa: D102
    @property
    def adapter_slots(self) -> int: ...  # noqa: D102
    @property
    def adapters_running(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def adapters_waiting(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def adapters_held(self) -> int: ...  # noqa: D102
    @property
    def lora_adapter_loads(self) -> int: ...  # noqa: D102
    @property
    def lora_adapter_bytes_read(self) -> int: ...  # noqa: D102


class OutputsLike(Protocol):
    """What a turn of an engine's loop gave, as far as metrics need it."""

    @property
    def stats(self) -> StatsLike: ...  # noqa: D102
    @property
    def record(self) -> StepRecord | None: ...  # noqa: D102
    @property
    def finished(self) -> Sequence[RequestRecord]: ...  # noqa: D102


class Metrics:
    """One registry of a server.

    Args:
        model_name: the label ``model_name`` of every series.
        num_engines: the label ``engine`` runs from 0; all series exist from the start.
    """

    def __init__(self, model_name: str, num_engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._meter_series: dict[str, MeterSeries] = {}
        self._rising: dict[tuple[int, str], int] = {}
        labels = ("model_name", "engine")

        self.num_requests_running = self._gauge("num_requests_running", "Requests in execution now.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests that wait now.")
        self.kv_cache_usage_perc = self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 means all of them.")
        self.host_pool_usage_perc = self._gauge(
            "host_pool_usage_perc", "Host slots that requests which gave way use; 1 means all."
        )
        self.host_blocks_cached = self._gauge("host_blocks_cached", "Host slots that keep an evicted prefix block.")
        self.kv_blocks_idle = self._gauge("kv_blocks_idle", "Free KV blocks that keep a prefix.")
        self.kv_unused_tokens = self._gauge(
            "kv_unused_tokens", "Positions without a token in KV blocks that requests hold; at most p − 1 a request."
        )
        self.kv_blocks_shared = self._gauge("kv_blocks_shared", "KV blocks that several requests hold.")
        self.counters = {
            name: Counter(f"foliolm:{name}", text, labels, registry=self.registry)
            for name, text in (
                ("num_preemptions", "Times a request's KV was given up."),
                ("num_failed_steps", "Steps that raised; their requests ended with an error."),
                ("swap_out_bytes", "Bytes of KV moved to the host."),
                ("swap_in_bytes", "Bytes of KV moved back from the host."),
                ("recomputed_tokens", "Tokens whose KV was computed, given up, and had to be computed again."),
                ("engine_deaths", "Times an engine's process ended by itself."),
                ("engine_restarts", "Times an engine's process was started again."),
                ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
                ("prefix_cache_hits", "Tokens found in the prefix cache, on the device and on the host."),
                ("prefix_cache_host_hits", "Of these, tokens found on the host."),
                ("prompt_forked_tokens", "Prompt tokens that siblings (n, beams) took over from one another."),
                ("kv_blocks_copied", "Shared KV blocks that were copied because one of their holders wrote."),
                ("kv_blocks_evicted", "Idle KV blocks whose prefix gave way on the device."),
                ("kv_blocks_offloaded", "Of these, blocks whose content the host kept."),
                ("kv_blocks_loaded", "Prefix blocks copied back from the host."),
                ("lora_adapter_bytes_read", "Bytes of LoRA adapters that steps read, each adapter of a step once."),
                ("lora_adapter_loads", "LoRA adapters copied into a slot of the device."),
                ("estimated_read_bytes_per_gpu", "Bytes that steps had to read, on one device (a CPU is one)."),
                ("estimated_flops_per_gpu", "Operations that steps had to compute, on one device."),
                ("forward_seconds", "Seconds inside the model's calls."),
                ("prompt_tokens", "Prompt tokens of requests that reached their first token."),
                ("generation_tokens", "Tokens sampled."),
            )
        }
        self.achieved_read = self._gauge(
            "achieved_read_bytes_per_second", "Bytes that the newest step had to read, over its seconds in the model."
        )
        self.achieved_flops = self._gauge(
            "achieved_flops_per_second", "Operations that the newest step had to compute, over the same seconds."
        )
        self.machine_read = self._gauge("machine_read_bytes_per_second", "Read bandwidth of the machine, as measured.")
        self.machine_flops = self._gauge(
            "machine_flops_per_second", "Operations a second of its matrix products, as measured."
        )
        self.lora_adapters_held = self._gauge("lora_adapters_held", "LoRA adapters in host memory.")
        self.lora_requests_info = Gauge(
            "foliolm:lora_requests_info",
            "Unix time since when these adapters have running and waiting requests.",
            (*labels, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=self.registry,
        )
        self._lora_info: dict[int, tuple[str, str, str]] = {}
        self.request_success = Counter(
            "foliolm:request_success", "Requests that ended.", (*labels, "finished_reason"), registry=self.registry
        )
        self.requests_refused = Counter(
            "foliolm:requests_refused", "Requests that got an error in place of an answer.", (*labels, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self.requests_timed_out = Counter(
            "foliolm:requests_timed_out", "Requests given up at a deadline.", (*labels, "phase"), registry=self.registry
        )
        self.iteration_tokens_total = self._histogram("iteration_tokens_total", "New tokens in a step.", _STEP_TOKENS)
        self.step_seconds = self._histogram("step_seconds", "Measured seconds of a step.", _SHORT_S)
        self.step_predicted_seconds = self._histogram(
            "step_predicted_seconds", "Seconds that the cost model predicted for a step.", _SHORT_S
        )
        self.step_residual_seconds = self._histogram(
            "step_residual_seconds", "Measured minus predicted seconds of a step.", _RESIDUAL_S
        )
        self.wait_seconds_by_reason = Counter(
            "foliolm:wait_seconds_by_reason", "Seconds that ended requests waited or were passed over, by reason.",
            (*labels, "reason"), registry=self.registry,
        )  # fmt: skip
        self.preempted_time = self._histogram(
            "preempted_time_seconds", "Seconds that a request spent without its KV, of those that lost it.", _LONG_S
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From HTTP accept to the first token.", _LONG_S
        )
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Gap between tokens.", _SHORT_S)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "(e2e − TTFT) / (tokens − 1) of a request.", _SHORT_S
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From HTTP accept to the last token.", _LONG_S
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "From queueing to admission.", _LONG_S)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Admission to first token.", _LONG_S)
        self.decode_time = self._histogram("request_decode_time_seconds", "First token to last token.", _LONG_S)
        self.inference_time = self._histogram("request_inference_time_seconds", "Admission to last token.", _LONG_S)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens that a request generated.", _TOKENS
        )
        self.request_params_n = self._histogram("request_params_n", "The n that requests ask for.", _N)
        for engine in range(num_engines):
            self._create_series(engine)

    def observe_outputs(self, engine: int, outputs: OutputsLike) -> None:
        """What a turn of an engine's loop gave."""
        self.observe_step(engine, outputs.stats, outputs.record)
        self.observe_requests(outputs.finished)

    def observe_step(self, engine: int, stats: StatsLike, record: StepRecord | None) -> None:
        """An engine's state after a turn of its loop, and the step that ran in it, if one did."""
        labels = (self._model, str(engine))
        self.num_requests_running.labels(*labels).set(stats.num_running)
        self.num_requests_waiting.labels(*labels).set(stats.num_waiting)
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        self.kv_cache_usage_perc.labels(*labels).set(usage)
        host = stats.host_blocks_used / stats.host_blocks_total if stats.host_blocks_total else 0.0
        self.host_pool_usage_perc.labels(*labels).set(host)
        self.host_blocks_cached.labels(*labels).set(stats.host_blocks_cached)
        self.kv_blocks_idle.labels(*labels).set(stats.kv_blocks_idle)
        self.kv_blocks_shared.labels(*labels).set(stats.kv_blocks_shared)
        self.kv_unused_tokens.labels(*labels).set(stats.kv_unused_tokens)
        for name in (
            "prompt_forked_tokens",
            "kv_blocks_copied",
            "kv_blocks_evicted",
            "kv_blocks_offloaded",
            "kv_blocks_loaded",
            "num_preemptions",
            "num_failed_steps",
            "recomputed_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "prefix_cache_host_hits",
            "swap_out_bytes",
            "swap_in_bytes",
            "lora_adapter_bytes_read",
            "lora_adapter_loads",
        ):
            self._raise_to(engine, name, getattr(stats, name))
        if stats.adapter_slots:
            self._observe_adapters(engine, stats)
        if record is not None:
            self.iteration_tokens_total.labels(*labels).observe(record.num_tokens)
            self.step_seconds.labels(*labels).observe(record.seconds.total)
            if record.predicted_s:
                self.step_predicted_seconds.labels(*labels).observe(record.predicted_s)
                self.step_residual_seconds.labels(*labels).observe(record.residual_s)
            if record.read_bytes:
                self.counters["estimated_read_bytes_per_gpu"].labels(*labels).inc(record.read_bytes)
                self.counters["estimated_flops_per_gpu"].labels(*labels).inc(record.flops)
                self.counters["forward_seconds"].labels(*labels).inc(record.compute_s)
                self.achieved_read.labels(*labels).set(record.read_rate)
                self.achieved_flops.labels(*labels).set(record.flop_rate)
            if record.num_sampled:
                self.counters["generation_tokens"].labels(*labels).inc(record.num_sampled)

    def _observe_adapters(self, engine: int, stats: StatsLike) -> None:
        self.lora_adapters_held.labels(self._model, str(engine)).set(stats.adapters_held)
        running, waiting = ",".join(sorted(stats.adapters_running)), ",".join(sorted(stats.adapters_waiting))
        info = (str(stats.adapter_slots), running, waiting)
        if self._lora_info.get(engine) != info:
            self._lora_info[engine] = info
            self.lora_requests_info.clear()  # what was so before is so no more
            for index, each in self._lora_info.items():
                self.lora_requests_info.labels(self._model, str(index), *each).set(time.time())

    def observe_requests(self, records: Sequence[RequestRecord]) -> None:
        """Requests that ended in an engine: the parts of their time that the engine knows."""
        for record in records:
            labels = (self._model, str(record.engine))
            stamps = record.stamps
            if stamps.admitted_ns:
                self.queue_time.labels(*labels).observe((stamps.admitted_ns - stamps.queued_ns) * _NS)
            if stamps.first_token_ns:
                self.prefill_time.labels(*labels).observe((stamps.first_token_ns - stamps.admitted_ns) * _NS)
                self.decode_time.labels(*labels).observe((stamps.last_token_ns - stamps.first_token_ns) * _NS)
                self.inference_time.labels(*labels).observe((stamps.last_token_ns - stamps.admitted_ns) * _NS)
            if record.timeline is not None:
                self._observe_waits(labels, record.timeline)
            self.request_prompt_tokens.labels(*labels).observe(record.num_prompt_tokens)
            self.request_generation_tokens.labels(*labels).observe(record.num_output_tokens)

    def _observe_waits(self, labels: tuple[str, str], timeline: RequestTimeline) -> None:
        for name, nanoseconds in timeline.parts:
            kind, _, reason = name.partition(":")
            if kind in ("queue", "skipped"):
                self.wait_seconds_by_reason.labels(*labels, reason or kind).inc(nanoseconds * _NS)
            elif kind == "preempted":
                self.preempted_time.labels(*labels).observe(nanoseconds * _NS)

    def observe_limits(self, engine: int, limits: MachineLimits) -> None:
        """What an engine's machine can do."""
        self.machine_read.labels(self._model, str(engine)).set(limits.read_bytes_per_s)
        self.machine_flops.labels(self._model, str(engine)).set(limits.flops_per_s)

    def observe_death(self, engine: int, error: Exception) -> None:
        """An engine's process ended; it runs nothing now."""
        labels = (self._model, str(engine))
        for gauge in (
            self.num_requests_running,
            self.num_requests_waiting,
            self.kv_cache_usage_perc,
            self.host_pool_usage_perc,
        ):
            gauge.labels(*labels).set(0)
        self.counters["engine_deaths"].labels(*labels).inc()

    def observe_restart(self, engine: int) -> None:
        """An engine's process was started again and takes requests."""
        self.counters["engine_restarts"].labels(self._model, str(engine)).inc()

    def observe_refusal(self, reason: str) -> None:
        """A request got an error in place of an answer; one of ``REFUSALS``."""
        self.requests_refused.labels(self._model, "0", reason).inc()

    def observe_timeout(self, phase: str) -> None:
        """A request was given up at a deadline: ``total`` or ``queue``."""
        self.requests_timed_out.labels(self._model, "0", phase).inc()

    def observe_params(self, n: int) -> None:
        """What a request asked for."""
        self.request_params_n.labels(self._model, "0").observe(n)

    def meter(self, arrival_ns: int, num_prompt_tokens: int) -> RequestMeter:
        """A meter for one choice of one request."""
        return RequestMeter(self, arrival_ns, num_prompt_tokens)

    def meter_series(self, engine: str) -> MeterSeries:
        """The series that the meters of an engine's requests write."""
        series = self._meter_series.get(engine)
        if series is None:
            labels = (self._model, engine)
            series = self._meter_series[engine] = MeterSeries(
                self.time_to_first_token.labels(*labels),
                self.inter_token_latency.labels(*labels),
                self.counters["prompt_tokens"].labels(*labels),
                self.e2e_latency.labels(*labels),
                self.time_per_output_token.labels(*labels),
            )
        return series

    def observe_end(self, engine: str, reason: str) -> None:
        """A choice ended: ``stop``, ``length``, ``abort`` or ``error``."""
        self.request_success.labels(self._model, engine, reason).inc()

    def exposition(self) -> bytes:
        """The text that ``/metrics`` returns, in the format that ``CONTENT_TYPE`` names."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"foliolm:{name}", text, ("model_name", "engine"), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"foliolm:{name}", text, ("model_name", "engine"), buckets=buckets, registry=self.registry)

    def _create_series(self, engine: int) -> None:
        # A series that appears only once it has a value looks to an alert like one that does not exist.
        for metric in vars(self).values():
            if isinstance(metric, Gauge | Histogram) and metric is not self.lora_requests_info:
                metric.labels(self._model, str(engine))
        for counter in self.counters.values():
            counter.labels(self._model, str(engine))
        self.lora_requests_info.labels(self._model, str(engine), "0", "", "")
        for reason in ("stop", "length", "abort", "error"):
            self.request_success.labels(self._model, str(engine), reason)
        for reason in REFUSALS:
            self.requests_refused.labels(self._model, str(engine), reason)
        for phase in ("queue", "total"):
            self.requests_timed_out.labels(self._model, str(engine), phase)

    def _raise_to(self, engine: int, name: str, value: int) -> None:
        # An engine that was started again counts from 0; the exported counter must never fall.
        before = self._rising.get((engine, name), 0)
        self._rising[engine, name] = value
        rise = value - before if value >= before else value
        if rise:
            self.counters[name].labels(self._model, str(engine)).inc(rise)


class MeterSeries(NamedTuple):
    """The series that a meter writes; looking them up by label for each token would cost more than the rest."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    prompt_tokens: Counter
    e2e_latency: Histogram
    time_per_output_token: Histogram


class RequestMeter:
    """Times one choice as the HTTP process sees it. Call it from the event loop's thread.

    Args:
        metrics: where observations go.
        arrival_ns: HTTP accept, monotonic nanoseconds.
        num_prompt_tokens: of its prompt.
    """

    __slots__ = ("_metrics", "_series", "arrival_ns", "first_ns", "last_ns", "num_prompt_tokens", "num_tokens")

    def __init__(self, metrics: Metrics, arrival_ns: int, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._series = metrics.meter_series("0")
        self.arrival_ns = arrival_ns
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.first_ns = 0
        self.last_ns = 0

    def tokens(self, count: int, now_ns: int) -> None:
        """``count`` new tokens came at ``now_ns``."""
        series = self._series
        if not self.num_tokens:
            self.first_ns = now_ns
            series.time_to_first_token.observe((now_ns - self.arrival_ns) * _NS)
            series.prompt_tokens.inc(self.num_prompt_tokens)
        else:
            for _ in range(count):
                series.inter_token_latency.observe((now_ns - self.last_ns) * _NS / count)
        self.num_tokens += count
        self.last_ns = now_ns

    def finish(self, reason: str) -> None:
        """It ended: ``stop``, ``length``, ``abort`` or ``error``."""
        self._metrics.observe_end("0", reason)
        if self.num_tokens:
            self._series.e2e_latency.observe((self.last_ns - self.arrival_ns) * _NS)
        if self.num_tokens > 1:
            per_token = (self.last_ns - self.first_ns) * _NS / (self.num_tokens - 1)
            self._series.time_per_output_token.observe(per_token)
