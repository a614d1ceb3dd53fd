"""No advice without proof: what ``foliolm explain`` predicts of its suggestions, and what they do on the real engine.

    python benchmarks/explain_effects.py [--scale 1.0] [--repeats 2] [--run NAME] [--json]

Three runs are recorded (a long prompt among streams, a pool too small, too many sequences). For each suggestion, the
changed settings serve the same arrivals for real; predicted and measured change of every goal are printed, by how much
it varies between repeats of the unchanged run, and whether the suggestion's own goal was ``foreseen``: of the same
sign, and within 25% of the measured change or within the repeats' spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from recorded_work import Job, engine_for, say, serve

from foliolm.ledger.reading import newest_run
from foliolm.simulate.advice import GOALS, advise
from foliolm.simulate.counterfactual import Recorded, recorded

BASE = {"max_model_len": 2048, "enable_prefix_caching": False}


def runs(scale: float) -> dict[str, tuple[dict, list[Job]]]:
    def streams(count: int, prompt: int, output: int, every: float) -> list[Job]:
        return [Job(i * every, prompt, max(4, round(output * scale))) for i in range(count)]

    long_prompts = [Job(1.0 + 2 * i, 1500, 4) for i in range(2)]
    return {
        "long_prompt": ({"max_num_seqs": 16, "max_num_batched_tokens": 1024}, streams(6, 48, 90, 0.05) + long_prompts),
        "small_pool": ({"max_num_seqs": 8, "num_gpu_blocks_override": 128, "max_num_batched_tokens": 256},
                       streams(8, 320, 60, 0.2)),
        "many_sequences": ({"max_num_seqs": 32, "num_gpu_blocks_override": 128, "max_num_batched_tokens": 128},
                           streams(24, 100, 60, 0.1)),
    }  # fmt: skip


def record(model: str, settings: dict, jobs: list[Job]) -> Recorded:
    """Serve the jobs for real, and read the books."""
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_for(model, **{**BASE, **settings}, ledger=folder)
        serve(engine, jobs)
        engine.close()
        return recorded(newest_run(Path(folder)))


def compared(goal: str, predicted: float, before: list[Recorded], after: list[Recorded]) -> dict[str, float]:
    """Relative changes of one metric."""
    old = [getattr(run.metrics, goal) for run in before]
    new = [getattr(run.metrics, goal) for run in after]
    return {
        "predicted": round(predicted, 3),
        "measured": round(statistics.median(new) / statistics.median(old) - 1, 3),
        "repeat_spread": round((max(old) - min(old)) / statistics.median(old), 3),
    }


def foreseen(change: dict[str, float]) -> bool:
    """Whether a prediction has the sign and about the size of what was measured."""
    miss = abs(change["predicted"] - change["measured"])
    near = miss <= max(0.25 * abs(change["measured"]), change["repeat_spread"])
    return near and change["predicted"] * change["measured"] > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scale", type=float, default=1.0, help="longer or shorter answers")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--run", action="append", help="only this run; may be given several times")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    report = {}
    for name, (settings, jobs) in runs(args.scale).items():
        if args.run and name not in args.run:
            continue
        before = [record(args.model, settings, jobs) for _ in range(args.repeats)]
        advised = advise(before[0])
        if not advised.advice:
            report[name] = None
            say(f"{name}: no advice")
            continue
        report[name] = []
        for advice in advised.advice:
            flag = advice.flags.partition(" ")[0].removeprefix("--").replace("-", "_")
            enables = flag.startswith("enable")
            value = advice.after if flag == "itl_target_ms" else (True if enables else int(advice.after))
            # What the metrics were is read at the same place in every repeat; alternating would need two engines.
            after = [record(args.model, {**settings, flag: value}, jobs) for _ in range(args.repeats)]
            goals = {goal: compared(goal, advice.effect[goal], before, after) for goal in GOALS}
            of_goal = goals[advice.goal]
            report[name].append({"change": advice.flags, "goal": advice.goal, "foreseen": foreseen(of_goal), **goals})
            say(f"{name}: {report[name][-1]}")
    print(json.dumps(report) if args.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
