"""The numbers of a measured run, under the names that a simulated one has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from foliolm.bench.answer import Answer
from foliolm.bench.checks import Verdict, judge
from foliolm.bench.client import bottleneck, client_report
from foliolm.bench.dialect import Dialect
from foliolm.bench.play import Played
from foliolm.simulate.spread import summary

_S = 1e-9
COMPARED = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
RATES = ("output_tokens_per_s", "requests_per_s")


def report(played: Played, dialect: Dialect) -> dict[str, Any]:
    """Seconds are floats, counts whole numbers; what a client cannot know is None.

    ``requests`` ended well; ``errors`` are the others by kind, ``refused`` those of them that got an HTTP 4xx. Times
    count from when a request was due, and are of whole answers only. TPOT is (e2e − TTFT)/(tokens − 1). A gap is
    between two chunks that brought tokens.
    """
    verdict = judge(played.answers, dialect.form == "token_ids", dialect.ignores_eos)
    good = [answer for answer in played.answers if not answer.error]
    spoke = [answer for answer in good if answer.first_ns]
    first = min((answer.due_ns for answer in played.answers), default=0)
    last = max((answer.last_ns for answer in spoke), default=first)
    span = (last - first) * _S
    output = sum(answer.num_output for answer in good)
    ttft, e2e = _seconds(a.first_ns - a.due_ns for a in spoke), _seconds(a.last_ns - a.due_ns for a in spoke)
    itl = played.gaps.summary()
    client = client_report(played.watch, played.late_s, played.connect_s, played.connections, played.most_in_flight)
    slow = bottleneck(client, ttft, itl)
    return {
        "requests": len(good),
        "simulated_s": None,
        "wall_s": played.wall_s,
        "steps": None,
        "ttft_s": ttft,
        "tpot_s": summary([_tpot_s(answer) for answer in spoke if answer.num_output > 1]),
        "itl_s": itl,
        "e2e_s": e2e,
        "queue_s": summary(()),
        "output_tokens_per_s": output / span if span > 0 else 0.0,
        "requests_per_s": len(good) / span if span > 0 else 0.0,
        "prefix_hit_ratio": _hit_ratio(good),
        "preemptions": None,
        "recomputed_tokens": None,
        "kv_usage": {"mean": None, "max": None},
        "refused": sum(400 <= answer.status < 500 for answer in played.answers if answer.error),
        "bound": "client" if slow else None,
        "waiting_share": None,
        "busy_share": None,
        "interrupted": played.interrupted,
        "measured_s": span,
        "prompt_tokens": sum(_prompt_tokens(answer) for answer in good),
        "prompt_tokens_asked": sum(answer.item.num_prompt for answer in good),
        "output_tokens": output,
        "output_tokens_asked": sum(answer.item.num_output for answer in good),
        "tokens_per_chunk": output / chunks if (chunks := sum(answer.chunks for answer in good)) else None,
        "prompts": dialect.form,
        **_failures(played, verdict),
        "client": {**client, "bottleneck": slow},
    }


def difference(measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """(simulated − measured) / measured, as fractions; None where either is not known."""
    found: dict[str, Any] = {
        key: {name: _relative(predicted[key][name], measured[key][name]) for name in measured[key]} for key in COMPARED
    }
    return {**found, **{key: _relative(predicted[key], measured[key]) for key in RATES}}


def _failures(played: Played, verdict: Verdict) -> dict[str, Any]:
    return {
        "failed": sum(counted.count for counted in verdict.errors.values()),
        "unfinished": played.unfinished,
        "errors": {kind: counted.to_json() for kind, counted in verdict.errors.items()},
        "checks": {kind: counted.to_json() for kind, counted in verdict.checks.items()},
        "broken_off": played.broken_off or None,
    }


def _seconds(values_ns: Iterator[int]) -> dict[str, float | None]:
    return summary(np.fromiter(values_ns, dtype=np.float64) * _S)


def _tpot_s(answer: Answer) -> float:
    return (answer.last_ns - answer.first_ns) * _S / (answer.num_output - 1)


def _prompt_tokens(answer: Answer) -> int:
    return answer.item.num_prompt if answer.prompt_tokens is None else answer.prompt_tokens


def _hit_ratio(good: list[Answer]) -> float | None:
    told = [answer for answer in good if answer.cached_tokens is not None]
    prompts = sum(_prompt_tokens(answer) for answer in told)
    return sum(answer.cached_tokens or 0 for answer in told) / prompts if prompts else None


def _relative(simulated: float | None, measured: float | None) -> float | None:
    return None if simulated is None or not measured else (simulated - measured) / measured
