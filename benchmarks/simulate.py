"""How fast and in how little memory the scheduler runs ahead of time.

    python benchmarks/simulate.py --trace AzureLLMInferenceTrace_conv.csv [--json]      # requests a second
    python benchmarks/simulate.py --requests 1000000 [--json]                           # peak memory, streamed

Qwen3-8B on an H100 with the product's own scheduler, KV manager and ledger. Requests a second are of this process's CPU
time, reading the trace included. Memory is the process's peak resident size.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from foliolm.cli.simulating.setup import describe
from foliolm.simulate.outcome import play
from foliolm.simulate.workload.options import WorkloadOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="of the azure format")
    parser.add_argument("--requests", type=int, default=None, help="without a trace: drawn, 5.5 a second, as in it")
    parser.add_argument("--no-leap", action="store_true", help="take every step by itself")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    machine, _ = describe("qwen3-8b", "h100-sxm", None, "auto", 1, None, None, None, None).machine({})
    if args.trace is not None:
        options = WorkloadOptions(trace=args.trace, format="azure", requests=args.requests)
    else:
        options = WorkloadOptions(
            requests=args.requests or 20_000, rate=5.5, input_len="lognormal:1155:0.96", output_len="lognormal:211:0.77"
        )
    began, cpu = time.perf_counter(), time.process_time()
    outcome = play(machine, options.build(0, machine.settings.max_model_len), leap=not args.no_leap)
    cpu_s = time.process_time() - cpu
    done = outcome.collector.num_ended
    report = {
        "requests": done,
        "steps": outcome.collector.steps,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(time.perf_counter() - began, 2),
        "requests_per_cpu_s": round(done / cpu_s, 1),
        "steps_per_cpu_s": round(outcome.collector.steps / cpu_s, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(report) if args.json else "\n".join(f"{name:>20}: {value}" for name, value in report.items()))


if __name__ == "__main__":
    main()
