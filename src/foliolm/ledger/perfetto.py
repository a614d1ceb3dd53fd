"""A run as a trace that Chrome's tracing page and Perfetto open (the JSON trace event format)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foliolm.ledger.reading import LedgerRun


def trace_events(run: LedgerRun) -> Iterator[dict[str, Any]]:
    """Events: a track of steps, counters of the batch, and a track a request with its stays.

    Times are microseconds since the first event of the run.
    """
    origin = min(
        [step.end_ns - round(step.seconds.total * 1e9) for step in run.steps]
        + [timeline.start_ns for timeline in run.timelines.values()]
    )
    yield _name(0, 0, "process_name", f"engine {run.engine.engine}: {run.engine.model}")
    yield _name(0, 0, "thread_name", "steps")
    yield _name(1, 0, "process_name", "requests")
    for step in run.steps:
        start = (step.end_ns - origin) / 1e3 - step.seconds.total * 1e6
        yield {
            "ph": "X",
            "pid": 0,
            "tid": 0,
            "name": step.kind,
            "ts": start,
            "dur": step.seconds.total * 1e6,
            "args": {
                "step": step.step_id,
                "decodes": step.num_decodes,
                "tokens": step.num_tokens,
                "context": step.context_tokens,
                "predicted_ms": step.predicted_s * 1e3,
                "closed": str(step.closed),
                "decisions": [f"{one.kind} {one.request_id}: {one.reason}" for one in step.decisions],
            },
        }
        counts = {"decodes": step.num_decodes, "prompt tokens": step.num_tokens - step.num_decodes}
        yield {"ph": "C", "pid": 0, "name": "batch", "ts": start, "args": counts}
        usage = {"blocks": step.kv_blocks_used, "waiting": step.num_waiting}
        yield {"ph": "C", "pid": 0, "name": "KV and queue", "ts": start, "args": usage}
    for record in run.requests:
        timeline = run.timelines.get(record.request_id)
        if timeline is None:
            continue
        label = record.label or f"request {record.request_id}"
        yield _name(1, record.request_id, "thread_name", label)
        stamps = record.stamps
        turns = [
            ("wait", timeline.start_ns, stamps.admitted_ns or timeline.end_ns),
            ("prefill", stamps.admitted_ns, stamps.first_token_ns),
            ("decode", stamps.first_token_ns, stamps.last_token_ns),
        ]
        shares = {name: value / 1e6 for name, value in timeline.parts}
        for name, begin, end in turns:
            if begin and end > begin:
                yield {
                    "ph": "X",
                    "pid": 1,
                    "tid": record.request_id,
                    "name": name,
                    "ts": (begin - origin) / 1e3,
                    "dur": (end - begin) / 1e3,
                    "args": {"milliseconds by part": shares},
                }


def _name(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
