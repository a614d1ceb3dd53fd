"""What users feel of a run, from its records: the same for a recorded run and for a virtual one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from foliolm.core.record import RequestRecord, StepRecord

_S = 1e-9


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Seconds, but for the rate.

    Attributes:
        output_tokens_per_s: output tokens over the time from the first arrival to the last commit.
        ttft_mean, ttft_p95: from arrival to the first token.
        itl_p50, itl_p95, itl_p99, itl_max: gaps between tokens of one request.
        e2e_mean: from arrival to the last token.
        makespan: from the first arrival to the last commit.
    """

    output_tokens_per_s: float
    ttft_mean: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    itl_p99: float
    itl_max: float
    e2e_mean: float
    makespan: float

    def to_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def run_metrics(steps: Sequence[StepRecord], requests: Iterable[RequestRecord]) -> RunMetrics:
    """Metrics of the requests that got a token, and of the gaps in all steps."""
    answered = [record for record in requests if record.stamps.first_token_ns]
    ttft = sorted((record.stamps.first_token_ns - _start(record)) * _S for record in answered)
    e2e = [(record.stamps.last_token_ns - _start(record)) * _S for record in answered if record.stamps.last_token_ns]
    gaps = token_gaps(steps)
    end = max((step.end_ns for step in steps), default=0)
    begin = min((_start(record) for record in answered), default=end)
    makespan = (end - begin) * _S
    tokens = sum(record.num_output_tokens for record in answered)
    return RunMetrics(
        output_tokens_per_s=tokens / makespan if makespan > 0 else 0.0,
        ttft_mean=sum(ttft) / len(ttft) if ttft else 0.0,
        ttft_p95=_at(ttft, 0.95),
        itl_p50=weighted_quantile(gaps, 0.5),
        itl_p95=weighted_quantile(gaps, 0.95),
        itl_p99=weighted_quantile(gaps, 0.99),
        itl_max=max((gap for gap, _ in gaps), default=0.0),
        e2e_mean=sum(e2e) / len(e2e) if e2e else 0.0,
        makespan=makespan,
    )


def token_gaps(steps: Sequence[StepRecord]) -> list[tuple[float, int]]:
    """(seconds between two tokens of a request, how many requests saw that gap), step by step."""
    gaps: list[tuple[float, int]] = []
    last_decode = 0
    fresh: dict[int, int] = {}  # first token of a stay, and when it was committed
    ids: tuple[int, ...] = ()
    for step in steps:
        if step.decode_ids is not None:
            ids = step.decode_ids
        if step.num_decodes:
            joined = [fresh[rid] for rid in ids if rid in fresh] if fresh else []
            others = step.num_decodes - len(joined)
            if others and last_decode:
                gaps.append(((step.end_ns - last_decode) * _S, others))
            gaps.extend(((step.end_ns - first) * _S, 1) for first in joined)
            fresh.clear()
            last_decode = step.end_ns
        for rid, _, _, sampled in step.rows:
            if sampled:
                fresh[rid] = step.end_ns
    return gaps


def weighted_quantile(values: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that at least ``share`` of the weight does not exceed; 0 without any."""
    ordered = sorted(values)
    total = sum(weight for _, weight in ordered)
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= share * total:
            return value
    return 0.0


def _start(record: RequestRecord) -> int:
    return record.timeline.start_ns if record.timeline is not None else record.stamps.arrival_ns


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
