"""A recorded run again, with one thing changed: the same arrivals, the engine's own scheduler, virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.adapter import AdapterSize
from foliolm.core.errors import ConfigError
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.ledger.gaps import host_gap_s
from foliolm.ledger.reading import LedgerRun
from foliolm.ledger.run_metrics import RunMetrics, run_metrics
from foliolm.ledger.samples import read_samples
from foliolm.ledger.step_cost import StepCost
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals

MOST_STEPS = 1200
"""Recorded steps whose arrivals are run again; of a longer run, those of its end."""

FEWEST_TO_FIT, MOST_TO_FIT = 40, 500


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run as it can be run again.

    Attributes:
        arrivals: requests, with as many output tokens as they got.
        settings: the scheduler's.
        cost: predicts.
        host_s: seconds between two steps.
        depth: steps in flight while the next is planned.
        itl_target_ms: as the engine had it.
        metrics: what was recorded of these requests.
        adapters: LoRA adapters that they name, by load id.
    """

    arrivals: tuple[Arrival, ...]
    settings: SchedulerConfig
    cost: StepCost
    host_s: float
    depth: int
    itl_target_ms: float | None
    metrics: RunMetrics
    adapters: Mapping[int, AdapterSize] = field(default_factory=dict)


def recorded(run: LedgerRun, cost: StepCost | None = None) -> Recorded:
    """The run's end, as far back as ``MOST_STEPS`` steps.

    Args:
        run: from a ledger.
        cost: predicts; None: the run's newest, fitted to the run's own steps where it has enough of them.

    Raises:
        ConfigError: it has no step cost or no request that ended.
    """
    if cost is None and run.cost is None:
        raise ConfigError("the ledger was written without a step cost; nothing can be predicted from it")
    cost = cost or fitted_cost(run)
    since = run.steps[-MOST_STEPS].end_ns if len(run.steps) > MOST_STEPS else 0
    requests = [record for record in run.requests if record.timeline is not None and sent_ns(record) >= since]
    if not requests:
        raise ConfigError("no request of the ledger arrived and ended within its newest steps")
    first = min(sent_ns(record) for record in requests)
    steps = [step for step in run.steps if step.end_ns >= first]
    arrivals = tuple(arrival_of(record, run.engine.scheduler.block_size) for record in requests)
    return Recorded(
        arrivals,
        run.engine.scheduler,
        cost,
        host_gap_s(steps),
        run.engine.depth,
        run.engine.itl_target_ms,
        run_metrics(steps, requests),
        run.adapters,
    )


def fitted_cost(run: LedgerRun) -> StepCost:
    """The run's newest step cost, fitted to its own steps where there are enough of them."""
    from foliolm.ledger.calibration import calibrate

    assert run.cost is not None
    steps = run.steps
    if not any(spec.window for spec in run.cost.model.kv):  # with windows, a step is read by those before it
        steps = steps[:: max(1, len(steps) // MOST_TO_FIT)]
    samples = read_samples(run.cost.model, steps)
    if len(samples) < FEWEST_TO_FIT:
        return run.cost
    return calibrate(run.cost, samples[:: max(1, len(samples) // MOST_TO_FIT)], hold_out=False).cost


def rerun(run: Recorded, settings: SchedulerConfig | None = None, itl_target_ms: float | None = None) -> RunMetrics:
    """Serve the arrivals again under ``settings`` (None: the recorded ones) and say what users would have felt."""
    steps, requests = rerun_records(run, settings, itl_target_ms)
    return run_metrics(steps, requests)


def rerun_records(
    run: Recorded, settings: SchedulerConfig | None = None, itl_target_ms: float | None = None
) -> tuple[Sequence[StepRecord], Sequence[RequestRecord]]:
    """As ``rerun``; the virtual run's own records."""
    clock = VirtualClock(min(arrival.time_ns for arrival in run.arrivals))
    books = Books(run.cost, itl_target_ms=itl_target_ms or run.itl_target_ms)
    engine = build_virtual_engine(settings or run.settings, books, clock, run.host_s, run.depth, adapters=run.adapters)
    steps: list[StepRecord] = []
    engine.ledger.on_step.append(steps.append)
    done = run_arrivals(engine, clock, run.arrivals)
    return steps, done.finished


def sent_ns(record: RequestRecord) -> int:
    """When a request was handed to the engine."""
    assert record.timeline is not None
    return record.timeline.start_ns + dict(record.timeline.parts).get("http", 0)


def arrival_of(record: RequestRecord, block_size: int) -> Arrival:
    """The request of a record, as many tokens long, with an answer as long as the one that it got."""
    assert record.timeline is not None
    request = EngineRequest(
        request_id=record.request_id,
        prompt_token_ids=_tokens(record, block_size),
        sampling=SamplingParams(temperature=0.0, max_tokens=max(1, record.num_output_tokens), ignore_eos=True),
        arrival_ns=record.timeline.start_ns,
        priority=record.priority,
        label=record.label,
        share_prefix=bool(record.prefix),
        adapter=record.adapter,
    )
    return Arrival(sent_ns(record), request)


def _tokens(record: RequestRecord, block_size: int) -> tuple[int, ...]:
    """Tokens that are equal where the recorded prompts were: a block's hash stands for its tokens."""
    tokens: list[int] = []
    for value in record.prefix:
        tokens += [value] + [0] * (block_size - 1)
    # What is no full block was nobody else's, as far as the books say.
    return tuple(tokens + [(1 << 33) + record.request_id] * (record.num_prompt_tokens - len(tokens)))


def changed(settings: SchedulerConfig, **values: object) -> SchedulerConfig:
    """The settings with some values changed, and those that must follow."""
    new = replace(settings, **values)  # type: ignore[arg-type]
    if new.max_num_seqs > new.max_num_batched_tokens:
        new = replace(new, max_num_batched_tokens=new.max_num_seqs)
    if "max_num_batched_tokens" in values and settings.long_prefill_token_threshold == max(
        1, settings.max_num_batched_tokens // 2
    ):
        new = replace(new, long_prefill_token_threshold=max(1, new.max_num_batched_tokens // 2))
    if "num_blocks" in values and settings.num_blocks > 1:
        new = replace(new, watermark_blocks=settings.watermark_blocks * new.num_blocks // settings.num_blocks)
    return new
