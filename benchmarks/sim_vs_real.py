"""How well a run is foreseen: this engine on this machine, simulated and measured, below, near and above saturation.

    python benchmarks/sim_vs_real.py [--scale 1.0] [--repeats 3] [--loads 0.5,0.8,1.1] [--kernels auto] [--json]

``foliolm serve`` with the embedded model and its ledger; closed loops of one workload, from whose steps
``foliolm calibrate`` fits the step cost; then 200 mixed requests of another workload (open loop, Poisson) at shares of
the rate at which the simulated engine is saturated, each --repeats times by ``foliolm bench --predict``. ``--scale
0.1`` asks a tenth of the requests of both.

For every load: measured (median of the repeats), predicted, error (simulated − measured) / measured, the repeats' own
spread (max − min) / median, and whether the error is within the larger of the bound and 1.5 spreads. The bounds:
throughput 5%, median TTFT and TPOT 10%, their P99 20%. The client shares the machine's cores with the server:
``client_bottleneck`` has its own signs of that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from serve import server

from foliolm.cli.planning.options import model_shape
from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.cost_file import load_cost
from foliolm.plan.setting import Setting
from foliolm.weights.store import pull

ENGINE = ["--max-num-seqs=16", "--max-model-len=1024", "--max-num-batched-tokens=256"]
ENGINE += ["--num-gpu-blocks-override=1024", "--no-enable-prefix-caching"]
CALIBRATE = ["--input-len", "lognormal:160:1", "--output-len", "uniform:8:40"]
JUDGE = ["--input-len", "lognormal:90:0.7", "--output-len", "lognormal:24:0.6"]
CLOSED = ((1, 8), (2, 8), (3, 12), (5, 24), (9, 36), (16, 64))
"""Senders, and requests at scale 1, of the loops that are calibrated on: every size of batch comes up."""
REQUESTS = 200
SATURATING = 1000
"""Requests at once from which the saturated rate is read: so many that the last ones' emptier steps do not count."""
BOUNDS = {
    ("output_tokens_per_s", None): 0.05,
    ("ttft_s", "p50"): 0.10,
    ("tpot_s", "p50"): 0.10,
    ("ttft_s", "p99"): 0.20,
    ("tpot_s", "p99"): 0.20,
}


def foliolm(*words: object) -> dict:
    """The JSON of a command."""
    command = [sys.executable, "-m", "foliolm", *map(str, words), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def describe(cost: Path, folder: Path) -> list[str]:
    """The simulated engine's flags: the served file in the number types that were served, on a device with the cost's
    rates."""
    source = str(pull("smollm2-135m").source)
    held = load_cost(cost).cost
    tflops = held.flops / 1e12
    device = {
        "id": "this-machine",
        "name": "where the steps were measured",
        "kind": "cpu",
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "bandwidth_gbps": held.bandwidth / 1e9,
        "fp32_tflops": tflops,
        "bf16_tflops_dense": tflops,
        "confidence": "measured",
        "source": "the ledger's step cost",
    }
    path = folder / "device.json"
    path.write_text(json.dumps(device))
    return ["--model", source, *number_types(source, held.model), "--device", str(path), "--cost", str(cost), *ENGINE]


def number_types(source: str, served: ModelAccount) -> list[str]:
    """The flags under which the file's account is the served engine's, whose kernels chose the types."""
    shape = model_shape(source)
    for quantization, kv in itertools.product((None, "float32", "bfloat16", "int8"), ("int8", "bfloat16", "float32")):
        if Setting(shape=shape, quantization=quantization, kv_cache_dtype=kv).account == served:
            weights = [] if quantization is None else ["--quantization", quantization]
            return [*weights, "--kv-cache-dtype", kv]
    raise SystemExit(f"no number types give the served engine's account: {served}")


def value(numbers: dict, key: str, part: str | None) -> float:
    return numbers[key] if part is None else numbers[key][part]


def judged(runs: list[dict]) -> dict[str, dict]:
    """Each number of one load against its bound."""
    found = {}
    for (key, part), bound in BOUNDS.items():
        measured = [value(run, key, part) for run in runs]
        middle, predicted = statistics.median(measured), value(runs[0]["predicted"], key, part)
        spread = (max(measured) - min(measured)) / middle
        error = predicted / middle - 1
        found[key if part is None else f"{key}.{part}"] = {
            "measured": round(middle, 4),
            "predicted": round(predicted, 4),
            "error": round(error, 4),
            "spread": round(spread, 4),
            "met": abs(error) <= max(bound, 1.5 * spread),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loads", default="0.5,0.8,1.1", help="shares of saturation")
    parser.add_argument("--kernels", default="auto", help="of the served engine")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    requests = max(4, round(REQUESTS * args.scale))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [*ENGINE, f"--kernels={args.kernels}", "--no-self-calibration", "--ledger", str(folder / "books")]
        with server(flags) as (host, port, _):
            url = f"http://{host}:{port}"
            for senders, count in CLOSED:
                count = max(senders, math.ceil(count * args.scale))
                foliolm("bench", url, "--concurrency", senders, "--requests", count, *CALIBRATE, "--seed", senders)
            fit = foliolm("calibrate", folder / "books", "--out", folder / "cost.json")
            engine = describe(folder / "cost.json", folder)
            work = ["--requests", requests, *JUDGE, "--seed", 77]
            many = ["--requests", SATURATING, *JUDGE, "--seed", 77]
            saturated = foliolm("simulate", *engine, "--rate", "inf", *many)["requests_per_s"]
            loads = []
            for load in map(float, args.loads.split(",")):
                words = ["bench", url, "--rate", load * saturated, *work, "--predict", *engine]
                runs = [foliolm(*words) for _ in range(args.repeats)]
                print(f"load {load}: {judged(runs)}", file=sys.stderr, flush=True)
                signs = [sign for run in runs for sign in run["client"]["bottleneck"]]
                loads.append(
                    {"load": load, "rate": round(load * saturated, 4), **judged(runs), "client_bottleneck": signs}
                )
    report = {
        "requests": requests,
        "repeats": args.repeats,
        "saturation_requests_per_s": round(saturated, 4),
        "calibration": {"steps": fit["steps"], "held_out": fit["held_out"]},
        "loads": loads,
        "met": all(part["met"] for each in loads for part in each.values() if isinstance(part, dict)),
    }
    print(json.dumps(report) if args.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
