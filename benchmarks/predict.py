"""How well the step cost predicts: calibrated on one workload, frozen, and judged on another.

    python benchmarks/predict.py [--repeats 3] [--scale 1.0] [--json]

Median absolute percentage error of decode-only, prefill-only and mixed steps; error of the total; and, from repeats of
the same schedule, by how much the same step's time itself varies (median over steps of (max − min) / median).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

from recorded_work import Job, engine_for, say, serve

from foliolm.ledger.calibration import calibrate
from foliolm.ledger.samples import Sample, SampleReader


def work(kind: str, scale: float) -> list[Job]:
    """All jobs are there from the start, so that repeats have the same steps: waiting is the scheduler's."""
    rng = random.Random(kind)
    count = max(4, round((20 if kind == "calibrate" else 16) * scale))
    low, high = (24, 700) if kind == "calibrate" else (48, 500)
    return [Job(0.0, rng.randrange(low, high), rng.randrange(12, 60)) for _ in range(count)]


def samples_of(engine, jobs: list[Job], seed: int) -> list[Sample]:
    reader = SampleReader(engine.ledger.cost.model)
    records: list = []
    engine.ledger.on_step.append(records.append)
    serve(engine, jobs, seed)
    engine.ledger.on_step.remove(records.append)
    return [sample for sample in map(reader.read, records) if sample is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    engine = engine_for(
        args.model,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        self_calibration=False,
    )
    known = []
    for repeat in range(2):
        known += samples_of(engine, work("calibrate", args.scale), repeat)
    cost = calibrate(engine.ledger.cost, known, hold_out=False).cost
    say(f"calibrated on {len(known)} steps")
    runs = [samples_of(engine, work("judge", args.scale), 7) for _ in range(args.repeats)]
    report: dict = {"steps": sum(len(run) for run in runs)}
    for kind in ("decode", "prefill", "mixed"):
        errors = [abs(cost.seconds(s.counts) / s.seconds - 1) for run in runs for s in run if s.kind == kind]
        report[f"{kind}_median_ape"] = round(statistics.median(errors), 4) if errors else None
    predicted = sum(cost.seconds(s.counts) for run in runs for s in run)
    report["total_error"] = round(predicted / sum(s.seconds for run in runs for s in run) - 1, 4)
    spreads: dict[str, list[float]] = {}
    for same in zip(*runs, strict=True):
        seconds = [sample.seconds for sample in same]
        spreads.setdefault(same[0].kind, []).append((max(seconds) - min(seconds)) / statistics.median(seconds))
    report["repeat_spread"] = round(statistics.median(spread for kind in spreads.values() for spread in kind), 4)
    report["repeat_spread_by_kind"] = {kind: round(statistics.median(of), 4) for kind, of in spreads.items()}
    engine.close()
    print(json.dumps(report) if args.json else "\n".join(f"{key}: {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()
