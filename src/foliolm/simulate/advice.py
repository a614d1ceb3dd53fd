"""What to change about a recorded run, each with its predicted effect; nothing is said that was not run again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from foliolm.core.resolve import SchedulerConfig
from foliolm.ledger.run_metrics import RunMetrics
from foliolm.simulate.counterfactual import Recorded, changed, rerun

GOALS = {
    "output_tokens_per_s": 1,
    "ttft_mean": -1,
    "itl_p95": -1,
    "itl_p99": -1,
    "e2e_mean": -1,
}
"""What is looked at, and which way is better."""
WORTH = 0.10
"""A change that moves no goal by this share is not worth a word."""
MOST = 6


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and what it is predicted to do.

    Attributes:
        flags: the command line's, as they would be given.
        setting: the scheduler's field that changes, or ``itl_target_ms``.
        before, after: its value.
        goal: the metric that gains most.
        effect: relative change of each metric of ``GOALS``: 0.2 means 20% more.
        needs: what the change costs beside time, for people; empty: nothing.
    """

    flags: str
    setting: str
    before: float
    after: float
    goal: str
    effect: dict[str, float]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Advised:
    """The advice about a run.

    Attributes:
        baseline: the run again in virtual time with nothing changed.
        advice: the best first.
        tried: how many changes were run.
    """

    baseline: RunMetrics
    advice: tuple[Advice, ...]
    tried: int


def advise(run: Recorded) -> Advised:
    """Run the arrivals again under each change, and keep what is worth it: all goals together gain."""
    baseline = rerun(run)
    found, tried = [], 0
    for setting, flag, before, after, settings, needs in candidates(run, baseline):
        tried += 1
        target = after if setting == "itl_target_ms" else None
        effect = relative(baseline, rerun(run, settings, target))
        gains = {name: sign * effect[name] for name, sign in GOALS.items()}
        goal = max(gains, key=lambda name: gains[name])
        value = _score(effect)
        if gains[goal] >= WORTH and value > 0:
            found.append((value, Advice(flag, setting, before, after, goal, effect, needs)))
    found.sort(key=lambda pair: -pair[0])
    best: dict[str, Advice] = {}
    for _, one in found:
        best.setdefault(one.setting, one)
    return Advised(baseline, tuple(best.values())[:MOST], tried)


def _score(effect: dict[str, float]) -> float:
    """Gains less losses, as logarithms of ratios; the two quantiles of the gaps are one goal."""
    logs = {name: sign * math.log(max(1e-9, 1 + effect[name])) for name, sign in GOALS.items()}
    gaps = (logs.pop("itl_p95") + logs.pop("itl_p99")) / 2
    return gaps + sum(logs.values())


def candidates(run: Recorded, baseline: RunMetrics) -> Iterator[tuple[str, str, float, float, SchedulerConfig, str]]:
    """(setting, flags, before, after, settings, what it needs) of each change to try; ``baseline``: nothing changed."""
    settings = run.settings
    budget, seqs, blocks = settings.max_num_batched_tokens, settings.max_num_seqs, settings.num_blocks
    for factor in (0.25, 0.5, 2, 4):
        after = int(budget * factor)
        whole = settings.mode == "chunked" or after >= settings.max_model_len
        if after >= max(16, seqs if factor < 1 else 1) and whole:
            new = changed(settings, max_num_batched_tokens=after)
            yield "max_num_batched_tokens", f"--max-num-batched-tokens {after}", budget, after, new, ""
    if settings.mode == "chunked" and run.itl_target_ms is None and baseline.itl_p99 > 2 * baseline.itl_p50 > 0:
        after_ms = round(2500 * baseline.itl_p50, 1)
        yield "itl_target_ms", f"--itl-target-ms {after_ms:g}", 0, after_ms, settings, ""
    peak = min(seqs, len(run.arrivals))
    for after in sorted({max(1, peak // 4), max(1, peak // 2), 2 * seqs} - {seqs}):
        new = changed(settings, max_num_seqs=after)
        yield "max_num_seqs", f"--max-num-seqs {after}", seqs, after, new, ""
    for factor in (2, 4):
        after = (blocks - 1) * factor
        size = sum(spec.bytes_per_block(settings.block_size) for spec in run.cost.model.kv) * (after - blocks + 1)
        new = changed(settings, num_blocks=after + 1)
        needs = f"{size / 2**20:,.0f} MiB more of KV memory"
        yield "num_blocks", f"--num-gpu-blocks-override {after}", blocks - 1, after, new, needs
    if not settings.enable_prefix_caching:
        new = changed(settings, enable_prefix_caching=True)
        yield "enable_prefix_caching", "--enable-prefix-caching", 0, 1, new, ""


def relative(before: RunMetrics, after: RunMetrics) -> dict[str, float]:
    """Relative change of each metric of ``GOALS``."""
    old, new = before.to_dict(), after.to_dict()
    return {name: new[name] / old[name] - 1 if old[name] else 0.0 for name in GOALS}
