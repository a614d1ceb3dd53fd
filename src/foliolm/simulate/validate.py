"""Measured runs again in virtual time, and how far off that is."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foliolm.assemble import Books
from foliolm.core.errors import ConfigError
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.resolve import SchedulerConfig
from foliolm.ledger.kernel_cost import HostTimes, KernelCost
from foliolm.ledger.kernel_tables import KernelTables
from foliolm.ledger.plan_cost import PlanCost
from foliolm.ledger.step_cost import StepCost
from foliolm.shape.model import ModelShape
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.measured_run import VLLM_SEQS, VLLM_TOKENS, MeasuredRun, Times
from foliolm.simulate.outcome import START_NS, Machine
from foliolm.simulate.run import Arrival, Leap, run_arrivals
from foliolm.simulate.workload.item import Item, as_request

if TYPE_CHECKING:
    from foliolm.core.plan import StepPlan
    from foliolm.core.protocols import CostModel

METRICS = ("ttft", "tpot", "latency")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
_NS = 1_000_000_000
_STEP_SCALE, _SEQUENCE_SCALE, _COLD_SCALE = 1e-3, 1e-5, 1e-2
_COLLECTIVE_SCALE = 1e-5
_TTFT_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the first part of a run says about its machine.

    Attributes:
        host: see ``HostTimes``.
        cold_s: extra seconds of each step with prompts while that part's requests arrived: a server's first steps of
            each size load and tune kernels. It delays that part, and whoever queues behind it.
        cold_until_ns: when the last of them arrived.
        requests: how many were looked at.
        error_before, error_after: root mean square of the relative errors of their TPOT and latency.
    """

    host: HostTimes
    cold_s: float = 0.0
    cold_until_ns: int = 0
    requests: int = 0
    error_before: float = 0.0
    error_after: float = 0.0


@dataclass(frozen=True, slots=True)
class Replay:
    """How a run is replayed.

    Attributes:
        run: measured.
        shape: its model.
        settings: of the scheduler of each engine.
        cost: the step cost, for the books and for what no table covers.
        tables: measured kernels, or None: the step cost alone.
        replicas: engines that share the requests.
        expert_ranks: engines that share the experts.
    """

    run: MeasuredRun
    shape: ModelShape
    settings: SchedulerConfig
    cost: StepCost
    tables: KernelTables | None = None
    replicas: int = 1
    expert_ranks: int = 1

    def model(self, fitted: Fitted | None = None) -> CostModel:
        """The step times, with what was fitted."""
        if self.tables is None:
            return PlanCost(self.cost)
        times = KernelCost(
            self.tables, self.shape, self.cost, None if fitted is None else fitted.host, self.expert_ranks
        )
        return ColdStart(times, fitted.cold_s, fitted.cold_until_ns) if fitted and fitted.cold_s else times

    def prior(self) -> HostTimes:
        """Host times before anything is fitted: none, and the step cost's own for all-reduces."""
        assert self.tables is not None
        return KernelCost(self.tables, self.shape, self.cost).host


class ColdStart:
    """A `CostModel` whose steps with prompts take longer until a certain time."""

    def __init__(self, times: CostModel, extra_s: float, until_ns: int) -> None:
        self._times, self._extra_s, self._until_ns = times, extra_s, until_ns

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of the whole step."""
        cold = plan.rows and plan.time_ns < self._until_ns
        return self._times.seconds(plan) + (self._extra_s if cold else 0.0)


def vllm_settings(run: MeasuredRun, num_blocks: int, max_model_len: int) -> SchedulerConfig:
    """The scheduler's settings that do what the run's engine does: no share for short prompts, no watermark."""
    seqs = run.whole("max_num_seqs", VLLM_SEQS)
    budget = run.whole("max_num_batched_tokens", VLLM_TOKENS)
    chunked = run.engine.get("enable_chunked_prefill", True) is not False
    if not chunked:
        budget = max(budget, max_model_len)
    return SchedulerConfig(
        mode="chunked" if chunked else "mixed",
        max_model_len=max_model_len,
        block_size=run.block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=max(budget, seqs),
        max_num_seqs=seqs,
        long_prefill_token_threshold=1 << 30,
        short_prompt_share=0.0,
        watermark_blocks=0,
        max_queued_requests=1 << 30,
        enable_prefix_caching=run.engine.get("enable_prefix_caching", True) is not False,
    )


@dataclass(slots=True)
class Replayed:
    """What came of a replay; of data-parallel engines the sums.

    Attributes:
        times: seconds by label.
        preemptions, recomputed_tokens: how often a request gave way, and the tokens that were computed again for it.
        kv_peak: most of an engine's KV blocks that were in use, 0 to 1.
        prefix_hit_ratio: prompt tokens found computed, over those looked up.
    """

    times: dict[str, Times] = field(default_factory=dict)
    preemptions: int = 0
    recomputed_tokens: int = 0
    kv_peak: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def prefix_hit_ratio(self) -> float:
        """See above; 0 where nothing was looked up."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


def replay(plan: Replay, fitted: Fitted | None = None, only: frozenset[str] | None = None) -> Replayed:
    """Serve the run's requests in virtual time.

    Args:
        plan: how.
        fitted: the machine's own times; None: kernels alone.
        only: stop when the requests of these labels have ended.
    """
    replayed = Replayed()
    for items in spread(plan.run.items, plan.replicas):
        books = Books(plan.cost, timelines=False)
        machine = Machine(plan.settings, books, 0.0, plan.run.depth, plan.model(fitted))
        wanted = None if only is None else {item.label for item in items} & only
        _serve(machine, items, wanted, replayed)
    return replayed


def spread(items: Sequence[Item], replicas: int) -> list[list[Item]]:
    """Share requests out to replicas: each to the one with the fewest tokens asked of it that may still be running.

    A request is taken to run for as long as its tokens take at an even pace; the real balancer looks at queues.
    """
    shares: list[list[Item]] = [[] for _ in range(replicas)]
    load = [(0, index) for index in range(replicas)]
    for item in items:
        asked, index = heapq.heappop(load)
        shares[index].append(item)
        heapq.heappush(load, (asked + item.num_prompt + item.num_output, index))
    return shares


class _Done(Exception):  # noqa: N818  # noqa: N818
    """Everybody that was looked for has ended."""


class _Stamps:
    """A `Watch` that keeps the times of those that ended."""

    def __init__(self, times: dict[str, Times], wanted: set[str] | None) -> None:
        self.times = times
        self.wanted = wanted
        self.most_blocks = 0

    def stepped(self, record: StepRecord) -> None:
        """A step was committed."""
        self.most_blocks = max(self.most_blocks, record.kv_blocks_used)

    def leapt(self, leap: Leap) -> None:
        """Decode steps were committed; blocks are only taken in them."""
        self.most_blocks = max(self.most_blocks, leap.kv_blocks_used[-1])

    def refused(self, request_id: int, why: str, now: int) -> None:
        """The run served it, so the settings must be wrong."""
        raise ConfigError(f"a request that the measured engine served is refused here: {why}")

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        stamps = record.stamps
        start = stamps.arrival_ns
        self.times[record.label] = Times(
            (stamps.first_token_ns - start) / _NS, (stamps.last_token_ns - start) / _NS, record.num_output_tokens
        )
        if self.wanted is not None:
            self.wanted.discard(record.label)
            if not self.wanted:
                raise _Done


def _serve(machine: Machine, items: Sequence[Item], wanted: set[str] | None, into: Replayed) -> None:
    clock = VirtualClock(START_NS)
    engine = machine.build(clock)
    requests = [as_request(item, number, START_NS) for number, item in enumerate(items, 1)]
    stamps = _Stamps(into.times, wanted)
    with contextlib.suppress(_Done):
        run_arrivals(engine, clock, [Arrival(request.sent_ns, request) for request in requests], watch=stamps)
    stats = engine.scheduler.stats()
    into.preemptions += stats.num_preemptions
    into.recomputed_tokens += stats.recomputed_tokens
    into.kv_peak = max(into.kv_peak, stamps.most_blocks / stats.kv_blocks_total)
    into.prefix_queries += stats.prefix_queries
    into.prefix_hits += stats.prefix_hits


@dataclass(slots=True)
class _Fit:
    """The parameters, and what the calibrating requests make of them."""

    plan: Replay
    labels: list[str]
    until_ns: int
    progress: Callable[[], None]
    parallel: bool
    calls: int = field(default=0)

    def fitted(self, values: Sequence[float]) -> Fitted:
        prior = self.plan.prior()
        host = replace(prior, step_s=values[0] * _STEP_SCALE, sequence_s=values[1] * _SEQUENCE_SCALE)
        if self.parallel:
            host = replace(host, link=prior.link / max(values[3], 1e-3), collective_s=values[4] * _COLLECTIVE_SCALE)
        return Fitted(host, values[2] * _COLD_SCALE, self.until_ns, len(self.labels))

    def errors(self, values: Sequence[float]) -> Any:
        """Logarithms of simulated over measured, of TPOT and latency; and a slight pull towards nothing."""
        self.calls += 1
        self.progress()
        times = replay(self.plan, self.fitted(values), frozenset(self.labels)).times
        found = []
        for label in self.labels:
            mine, theirs = times[label], self.plan.run.times[label]
            found += [np.log(mine.tpot / theirs.tpot), np.log(mine.latency / theirs.latency)]
        for label in self.labels:
            # Times to first token say what steps with prompts take; they are short, and depend on luck.
            found.append(_TTFT_WEIGHT * np.log(times[label].ttft / self.plan.run.times[label].ttft))
        return np.array([*found, *(1e-3 * np.asarray(values[:3]))])


def calibrate_first(plan: Replay, share: float, progress: Callable[[], None] = lambda: None) -> Fitted:
    """Fit to the first ``share`` of the requests what no kernel table holds.

    Least squares of the logarithms of TPOT, latency and (a fifth as heavy) TTFT, over host seconds of a step and of a
    sequence, the cold start, and under tensor parallelism the link's rate and the start of an all-reduce; all at
    least 0.

    Raises:
        ConfigError: there are no tables, or fewer than four requests to fit to.
    """
    from scipy.optimize import least_squares

    if plan.tables is None:
        raise ConfigError("--calibrate-first fits what kernel tables lack; give --kernels")
    if not 0 < share < 1:
        raise ConfigError(f"--calibrate-first is {share}; it must be between 0 and 1")
    labels = first_labels(plan.run, share)
    if len(labels) < 4:
        raise ConfigError(f"--calibrate-first {share} of {len(plan.run.items)} requests is fewer than 4")
    parallel = plan.shape is not None and plan.cost.model.tensor_parallel_size > 1
    until = max(item.time_ns for item in plan.run.items if item.label in set(labels)) + START_NS
    fit = _Fit(plan, labels, until, progress, parallel)
    start = [0.3, 0.1, 0.1] + ([1.0, 2.0] if parallel else [])
    high = [50.0, 100.0, 20.0] + ([10.0, 100.0] if parallel else [])
    before = fit.errors([0.0] * 3 + start[3:])
    found = least_squares(
        fit.errors, start, bounds=([0.0] * 3 + ([0.1, 0.0] if parallel else []), high), diff_step=0.1, max_nfev=12
    )
    count = 2 * len(labels)
    return replace(
        fit.fitted(found.x),
        error_before=float(np.sqrt(np.mean(before[:count] ** 2))),
        error_after=float(np.sqrt(np.mean(found.fun[:count] ** 2))),
    )


def first_labels(run: MeasuredRun, share: float) -> list[str]:
    """Labels of the first ``share`` of the requests, by arrival."""
    return [item.label for item in run.items[: round(share * len(run.items))]]


def statistics(times: Mapping[str, Times], labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean, median and percentiles (interpolated linearly) of each metric, seconds."""
    found = {}
    for metric in METRICS:
        values = np.array(
            [getattr(times[label], metric) for label in labels if metric != "tpot" or times[label].output > 1]
        )
        found[metric] = dict(
            zip(STATISTICS, (float(values.mean()), *map(float, np.percentile(values, (50, 90, 95, 99)))), strict=True)
        )
    return found


def compare(run: MeasuredRun, simulated: Mapping[str, Times], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By metric: ``NAME_error = (simulated − measured) / measured``, and both values."""
    theirs, ours = statistics(run.times, labels), statistics(simulated, labels)
    return {
        metric: {
            **{f"{name}_error": ours[metric][name] / theirs[metric][name] - 1 for name in STATISTICS},
            "measured": theirs[metric],
            "simulated": ours[metric],
        }
        for metric in METRICS
    }
