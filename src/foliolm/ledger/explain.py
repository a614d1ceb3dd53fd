"""What a ledger says: where the time went, what a step read, what it reached of the machine, which steps were slow."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foliolm.core.machine import MachineLimits
from foliolm.core.plan import NOBODY, DecisionKind
from foliolm.core.record import TERMS, RequestRecord, StepRecord
from foliolm.core.timeline import RequestTimeline, ordered
from foliolm.ledger.accounts import knee_batch, kv_bytes_of_context, read_per_output_token, weight_bytes_per_step
from foliolm.ledger.adapter_account import AdapterAccount, lora_account
from foliolm.ledger.gaps import host_and_idle_s
from foliolm.ledger.reading import LedgerRun
from foliolm.ledger.roofline import Achieved, achieved
from foliolm.ledger.run_metrics import RunMetrics, run_metrics
from foliolm.ledger.step_cost import StepCost

_S = 1e-9
SLOW_FACTOR = 1.5
"""A step that takes this many times what was predicted is reported as slow."""
MOST_SLOW = 10
MOST_GAVE_WAY = 50


@dataclass(frozen=True, slots=True)
class KindOfSteps:
    """Steps of one kind together.

    Attributes:
        count: steps.
        seconds, predicted_s: measured and predicted, summed.
        median_ape: median of the absolute relative error of the prediction.
    """

    count: int
    seconds: float
    predicted_s: float
    median_ape: float


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The average decode step, in bytes.

    Attributes:
        batch, context: mean decode rows, and mean tokens of context of each.
        weight_bytes, kv_bytes: that it reads.
        bytes_per_token, floor_bytes: read for each token that it yields; and what a batch without end would read.
        knee: smallest batch at which the weights' share of a token is no more than its KV, or None.
    """

    batch: float
    context: float
    weight_bytes: float
    kv_bytes: float
    bytes_per_token: float
    floor_bytes: float
    knee: int | None


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took much longer than predicted."""

    step_id: int
    kind: str
    rows: int
    tokens: int
    seconds: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class GaveWay:
    """A request that gave its KV blocks up to others, and why so.

    Attributes:
        step_id, request_id: when, and who.
        treatment: ``swap``, ``recompute``, or ``host_full``: recompute, because the host pool had no room.
        needed, available: blocks that were wanted, and free.
        blocker: for whom first.
        swap_s, recompute_s: predicted seconds of each treatment; None where it was not known.
    """

    step_id: int
    request_id: int
    treatment: str
    needed: int
    available: int
    blocker: int | None
    swap_s: float | None
    recompute_s: float | None


@dataclass(frozen=True, slots=True)
class OnHost:
    """What the host pool did for the prefix cache.

    Attributes:
        moved_blocks, loaded_blocks: evicted prefix blocks copied there, and blocks copied back.
        requests: that took their prompt's beginning from there.
        copy_s, compute_s: predicted seconds of those requests' prompts as it was done, and had they been computed.
        declined: requests for which computing was predicted to be cheaper.
    """

    moved_blocks: int
    loaded_blocks: int
    requests: int
    copy_s: float
    compute_s: float
    declined: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """All of it; seconds unless the name says otherwise.

    Attributes:
        model: served.
        num_steps, num_requests: of the run.
        metrics: what users felt.
        busy_s, host_s, idle_s: the run's time: in steps, between steps, and with nothing to do.
        parts: where the requests' time went, summed over them.
        kinds: steps by kind.
        terms: predicted seconds by term, summed.
        closed: steps by what closed their budget.
        preemptions: how often a request gave way.
        gave_way: the newest of these, with reasons and predicted costs.
        treatments: preemptions by treatment.
        swapped_bytes: moved between device and host.
        on_host: prefixes that were evicted and lived on there.
        point: of the decode steps; None where there were none or no cost model.
        limits: of the machine; None: the header of the ledger has none.
        achieved: by kind of step, how near these it ran.
        bandwidth_share, flops_share: bytes and FLOPs of all steps over what the machine could in the busy time; None
            where its limits are unknown.
        slow: the slowest against prediction.
        cost_source: where the last predictions came from.
        num_torn: lines lost to a crash.
        lora: adapters' account; None where no step had a row of one.
    """

    model: str
    num_steps: int
    num_requests: int
    metrics: RunMetrics
    busy_s: float
    host_s: float
    idle_s: float
    parts: dict[str, float]
    kinds: dict[str, KindOfSteps]
    terms: dict[str, float]
    closed: dict[str, int]
    preemptions: int
    gave_way: tuple[GaveWay, ...]
    treatments: dict[str, int]
    swapped_bytes: int
    on_host: OnHost
    point: OperatingPoint | None
    limits: MachineLimits | None
    achieved: tuple[Achieved, ...]
    bandwidth_share: float | None
    flops_share: float | None
    slow: tuple[SlowStep, ...]
    cost_source: str
    num_torn: int
    lora: AdapterAccount | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def explain(run: LedgerRun) -> Explanation:
    """Work a run out."""
    steps, cost = run.steps, run.cost
    busy = sum(step.seconds.total for step in steps)
    host, idle = host_and_idle_s(steps)
    limits = run.engine.limits
    bandwidth_share = flops_share = None
    if limits is not None and busy:
        bandwidth_share = sum(step.read_bytes for step in steps) / (busy * limits.read_bytes_per_s)
        flops_share = sum(step.flops for step in steps) / (busy * limits.flops_per_s)
    parts: dict[str, int] = {}
    for timeline in run.timelines.values():
        for name, value in timeline.parts:
            parts[name] = parts.get(name, 0) + value
    gave_way = _gave_way(steps)
    return Explanation(
        model=run.engine.model,
        num_steps=len(steps),
        num_requests=len(run.requests),
        metrics=run_metrics(steps, run.requests),
        busy_s=busy,
        host_s=host,
        idle_s=idle,
        parts={name: value * _S for name, value in ordered(parts)},
        kinds=_kinds(steps),
        terms=_terms(steps),
        closed=dict(Counter(str(step.closed) for step in steps)),
        preemptions=len(gave_way),
        gave_way=gave_way[-MOST_GAVE_WAY:],
        treatments=dict(Counter(one.treatment for one in gave_way)),
        swapped_bytes=sum(note.num_bytes for step in steps for note in step.swapped),
        on_host=_on_host(steps),
        point=None if cost is None else _operating_point(steps, cost),
        limits=limits,
        achieved=achieved(steps, limits),
        bandwidth_share=bandwidth_share,
        flops_share=flops_share,
        slow=_slow(steps),
        cost_source=steps[-1].cost_source if steps else "",
        num_torn=run.num_torn,
        lora=lora_account(steps),
    )


def http_s(requests: Sequence[RequestRecord]) -> float:
    """Median seconds from the acceptance of a request to the engine's queue; 0 where none was accepted over HTTP."""
    parts = [dict(record.timeline.parts) for record in requests if record.timeline is not None]
    return statistics.median(part.get("http", 0) * _S for part in parts) if parts else 0.0


def delivery_s(run: LedgerRun) -> float:
    """Median seconds from a request's last commit to its last byte being handed to the socket; 0 without HTTP."""
    ways = [
        (run.timelines[record.request_id].end_ns - record.timeline.end_ns) * _S
        for record in run.requests
        if record.timeline is not None and dict(record.timeline.parts).get("http")
    ]
    return statistics.median(ways) if ways else 0.0


def request_lines(timeline: RequestTimeline, labels: dict[int, str]) -> list[tuple[str, float, float]]:
    """(what, seconds, share) of one request, others' prompts by name below their sum."""
    total = max(1, timeline.total_ns)
    lines = []
    for name, value in timeline.parts:
        lines.append((name, value * _S, value / total))
        if name == "others_prefill":
            for rid, part in timeline.prefill_of:
                lines.append((f"  of {labels.get(rid) or f'request {rid}'}", part * _S, part / total))
    return lines


def _kinds(steps: Sequence[StepRecord]) -> dict[str, KindOfSteps]:
    by_kind: dict[str, list[StepRecord]] = {}
    for step in steps:
        by_kind.setdefault(step.kind, []).append(step)
    return {
        kind: KindOfSteps(
            len(of_kind),
            sum(step.seconds.total for step in of_kind),
            sum(step.predicted_s for step in of_kind),
            statistics.median(
                abs(step.predicted_s / step.seconds.total - 1) if step.seconds.total else 0.0 for step in of_kind
            ),
        )
        for kind, of_kind in sorted(by_kind.items())
    }


def _terms(steps: Sequence[StepRecord]) -> dict[str, float]:
    totals = [0.0] * len(TERMS)
    for step in steps:
        for index, value in enumerate(step.terms):
            totals[index] += value
    return {name: value for name, value in zip(TERMS, totals, strict=True) if value}


def _gave_way(steps: Sequence[StepRecord]) -> tuple[GaveWay, ...]:
    found = []
    for step in steps:
        for one in step.decisions:
            if one.kind is DecisionKind.PREEMPT:
                costs = dict(one.predicted_s)
                found.append(
                    GaveWay(
                        step.step_id,
                        one.request_id,
                        one.reason,
                        one.needed,
                        one.available,
                        one.blocker,
                        costs.get("swap"),
                        costs.get("recompute"),
                    )
                )
    return tuple(found)


def _on_host(steps: Sequence[StepRecord]) -> OnHost:
    moved = loaded = requests = declined = 0
    copy_s = compute_s = 0.0
    for step in steps:
        taken = set()
        for one in step.decisions:
            costs = dict(one.predicted_s)
            if one.kind is not DecisionKind.ADMIT or (one.reason != "prefix_from_host" and "copy" not in costs):
                continue
            if one.reason != "prefix_from_host":
                declined += 1
                continue
            taken.add(one.request_id)
            copy_s += costs.get("copy", 0.0)
            compute_s += costs.get("compute", 0.0)
        requests += len(taken)
        moved += sum(note.blocks_out for note in step.swapped if note.request_id == NOBODY)
        loaded += sum(note.blocks_in for note in step.swapped if note.request_id in taken)
    return OnHost(moved, loaded, requests, copy_s, compute_s, declined)


def _operating_point(steps: Sequence[StepRecord], cost: StepCost) -> OperatingPoint | None:
    decoding = [step for step in steps if step.num_decodes]
    if not decoding:
        return None
    rows = sum(step.num_decodes for step in decoding)
    batch = rows / len(decoding)
    context = sum(step.decode_context for step in decoding) / rows
    weights = weight_bytes_per_step(cost.model, batch)
    kv = batch * kv_bytes_of_context(cost.model, context)
    return OperatingPoint(
        batch=batch,
        context=context,
        weight_bytes=weights,
        kv_bytes=kv,
        bytes_per_token=(weights + kv) / batch,
        floor_bytes=kv_bytes_of_context(cost.model, context),
        knee=knee_batch(cost.model, max(1, round(context))),
    )


def _slow(steps: Sequence[StepRecord]) -> tuple[SlowStep, ...]:
    late = [step for step in steps if step.predicted_s > 0 and step.seconds.total > SLOW_FACTOR * step.predicted_s]
    late.sort(key=lambda step: step.predicted_s - step.seconds.total)
    return tuple(
        SlowStep(step.step_id, step.kind, step.num_rows, step.num_tokens, step.seconds.total, step.predicted_s)
        for step in late[:MOST_SLOW]
    )


def bytes_curve(cost: StepCost, context: float, batches: Sequence[int]) -> list[tuple[int, float, float]]:
    """(batch, bytes read for each token, predicted seconds of a decode step) at one context."""
    at = max(1, round(context))
    return [(b, read_per_output_token(cost.model, b, at), cost.decode_seconds(b, at)) for b in batches]
