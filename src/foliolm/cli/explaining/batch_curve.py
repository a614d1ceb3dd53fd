"""The engine at batches 1, 2, 4, …: what a step takes, and what each doubling buys."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from foliolm.core.config import EngineConfig
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from foliolm.ledger.accounts import knee_batch, kv_bytes_of_context, read_per_output_token

if TYPE_CHECKING:
    from foliolm.core.record import StepRecord
    from foliolm.engine.engine import Engine

STEPS = 16
"""Decode steps that are timed at each batch; the median counts."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One batch.

    Attributes:
        batch, context: rows of a step, and mean tokens of context of each.
        measured_s, predicted_s: medians over the timed steps.
        tokens_per_s: batch over the measured step.
        bytes_per_token: read for each token that the step yields.
        gain: tokens/s over those of half the batch, or None for the first.
    """

    batch: int
    context: float
    measured_s: float
    predicted_s: float
    tokens_per_s: float
    bytes_per_token: float
    gain: float | None


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """The curve.

    Attributes:
        points: by batch, doubling.
        knee: smallest batch at which a token's share of the weights is no more than its KV, or None.
        floor_bytes: what a token reads in a batch without end.
        cost_source: where the predictions came from.
    """

    points: tuple[BatchPoint, ...]
    knee: int | None
    floor_bytes: float
    cost_source: str


def measure(model: str, context: int, most: int, repeats: int = 1) -> BatchCurve:
    """Run the engine at each batch; of several rounds each batch's fastest median counts.

    Raises:
        ConfigError: the context does not fit the model or the memory.
    """
    from foliolm.assemble import build_engine

    config = EngineConfig(
        model=model,
        max_model_len=context + STEPS + 8,
        max_num_seqs=most,
        self_calibration=False,
    )
    engine = build_engine(config, report=lambda line: print(line, file=sys.stderr))
    try:
        return _curve(engine, context, most, repeats)
    finally:
        engine.close()


def _curve(engine: Engine, context: int, most: int, repeats: int) -> BatchCurve:
    cost = engine.ledger.cost
    assert cost is not None
    batches = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    best: dict[int, list[StepRecord]] = {}
    for repeat in range(repeats):
        for batch in batches:
            steps = _decode_steps(engine, batch, context, 1 + repeat)
            known = best.get(batch)
            if known is None or _median(steps) < _median(known):
                best[batch] = steps
    points: list[BatchPoint] = []
    for batch in batches:
        measured = _median(best[batch])
        at = statistics.fmean(step.decode_context / step.num_decodes for step in best[batch])
        rate = batch / measured
        points.append(
            BatchPoint(
                batch,
                at,
                measured,
                statistics.median(step.predicted_s for step in best[batch]),
                rate,
                read_per_output_token(cost.model, batch, round(at)),
                rate / points[-1].tokens_per_s if points else None,
            )
        )
    return BatchCurve(
        tuple(points),
        knee_batch(cost.model, context),
        kv_bytes_of_context(cost.model, context),
        engine.ledger.cost_source,
    )


def _decode_steps(engine: Engine, batch: int, context: int, first: int) -> list[StepRecord]:
    """Steps in which exactly ``batch`` streams decode; their prompts are one, so that a shared prefix is found."""
    prompt = tuple(100 + (7 * i + first) % 20000 for i in range(context))
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS + 4, ignore_eos=True)
    known = max((record.request_id for record in engine.ledger.requests), default=0)
    engine.add([EngineRequest(known + 1 + row, prompt, sampling) for row in range(batch)])
    steps = []
    while engine.has_work:
        engine.step()
        record = engine.last_record
        if record is not None and record.num_decodes == batch and not record.rows:
            steps.append(record)
    engine.take_finished()
    return steps[1:] or steps


def _median(steps: list[StepRecord]) -> float:
    return statistics.median(step.seconds.total for step in steps)


def curve_dict(curve: BatchCurve) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(curve)


def show(model: str, context: int, most: int, as_json: bool) -> None:
    """Measure, and print a table or one line of JSON."""
    curve = measure(model, context, most)
    if as_json:
        print(json.dumps(curve_dict(curve), allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model} at {context} tokens of context", title_justify="left")
    for name in ("batch", "step", "predicted", "tokens/s", "MB a token", "the doubling bought"):
        table.add_column(name, justify="right")
    for point in curve.points:
        table.add_row(
            str(point.batch),
            f"{point.measured_s * 1e3:.1f} ms",
            f"{point.predicted_s * 1e3:.1f} ms",
            f"{point.tokens_per_s:.1f}",
            f"{point.bytes_per_token / 1e6:.2f}",
            "" if point.gain is None else f"{point.gain - 1:+.0%} tokens/s",
        )
    console = Console()
    console.print(table)
    knee = "no knee" if curve.knee is None else f"the knee is at {curve.knee} rows"
    console.print(
        f"{knee}: up to there a token's share of the weights is more than its own KV; "
        f"the floor is {curve.floor_bytes / 1e6:.2f} MB a token, however large the batch. "
        "A bigger batch makes a step slower and the whole faster; past the knee it buys little."
    )
