"""How long `foliolm explain` takes over a long run's books, advice included.

    python benchmarks/explain_speed.py [--steps 100000] [--json]

The books are written by the engine in virtual time. Reported: steps in the books, wall and CPU seconds of the command
in a process of its own, and whether it imported torch (it must not).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.record import RequestRecord
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.ledger.accounts import account
from foliolm.ledger.step_cost import StepCost
from foliolm.shape.presets import model_preset
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals

SECOND = 1_000_000_000
PROMPT, OUTPUT = 200, 200
EXPLAIN = """
import sys
from foliolm.cli.main import main
sys.argv = ["foliolm", "explain", sys.argv[1], "--json"]
try:
    main()
finally:
    print(int("torch" in sys.modules), file=sys.stderr)
"""


def write_books(folder: str, steps: int) -> int:
    """A run of at least ``steps`` steps, one request every half second; returns how many it has."""
    clock = VirtualClock(1)
    settings = SchedulerConfig(max_model_len=4096, num_blocks=8000, max_num_batched_tokens=512, max_num_seqs=16)
    # Slow enough for a handful of requests to run at once.
    books = Books(StepCost(account(model_preset("qwen3-8b").shape), 1e12, 1e14, 1e14), ledger=folder)
    engine = build_virtual_engine(settings, books, clock, host_s=1e-4)

    def arrival(number: int, now: int) -> Arrival:
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        prompt = tuple(range(number, number + PROMPT))
        return Arrival(now, EngineRequest(number, prompt, sampling, arrival_ns=now))

    def following(record: RequestRecord, now: int) -> Iterator[Arrival]:
        if engine.ledger.totals.num_steps < steps:
            yield arrival(record.request_id + 8, now)

    run_arrivals(engine, clock, [arrival(number, number * SECOND // 2) for number in range(1, 9)], following)
    engine.close()
    return engine.ledger.totals.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = write_books(folder, args.steps)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run([sys.executable, "-c", EXPLAIN, folder], capture_output=True, text=True, check=True)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stdout)
    assert said["num_steps"] == steps
    report = {
        "steps": steps,
        "requests": said["num_requests"],
        "changes_tried": said["advice"]["tried"],
        "wall_s": round(wall, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "imported_torch": bool(int(done.stderr.split()[-1])),
    }
    print(json.dumps(report) if args.json else "\n".join(f"{key}: {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()
