"""How well a run is foreseen: this engine on this machine, simulated and measured, below, near and above saturation.

    python benchmarks/sim_vs_real.py [--scale 1.0] [--repeats 3] [--loads 0.5,0.8,1.1] [--kernels auto] [--keep DIR]

``foliolm serve`` with the embedded model and a ledger is sent closed loops of one workload; from their steps, and from
them alone, ``foliolm calibrate`` fits the step cost. Then come 200 mixed requests of another workload (open loop,
Poisson) at shares of the rate at which the simulated engine is saturated. In a repeat, which has a server of its own,
the loops are played before each load and after the last (every other time from the highest load down): machines change
their pace by the minute, and the fit is to have seen as many minutes as the loads have. The rates are those of a fit to
the first loops; what is foreseen is of the fit to all of them.

For every load: measured (median of the repeats), predicted, error (simulated − measured) / measured, the repeats' own
spread (max − min) / median, and whether the error is within the larger of the bound and 1.5 spreads. The bounds:
throughput 5%, median TTFT and TPOT 10%, their P99 20%. The client shares the machine's cores with the server:
``client_bottleneck`` has its own signs of that; ``others_cores`` is what processes that have nothing to do with it took
at most, ``stolen_cores`` what other machines of the same host did (Linux). Where others took more than a tenth of a
core, ``quiet`` is false, and so is ``met``: repeats then differ by so much that their spread would excuse any error.

With ``--keep DIR`` the repeats of earlier calls count too, so that several short calls make one report; ``--repeats 0``
only reports. ``--scale 0.1`` asks a tenth of the requests of both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from serve import cpu_seconds, server

from foliolm.cli.planning.options import model_shape
from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.cost_file import load_cost
from foliolm.plan.setting import Setting
from foliolm.weights.store import pull

ENGINE = ["--max-num-seqs=16", "--max-model-len=1024", "--max-num-batched-tokens=256"]
ENGINE += ["--num-gpu-blocks-override=1024", "--no-enable-prefix-caching"]
CALIBRATE = ["--input-len", "uniform:8:320", "--output-len", "uniform:8:56"]
JUDGE = ["--input-len", "lognormal:90:0.7", "--output-len", "lognormal:24:0.6"]
CLOSED = ((1, 2), (2, 4), (3, 6), (5, 10), (9, 18), (16, 32))
"""Senders, and requests at scale 1, of the loops that are calibrated on: every size of batch comes up."""
MOST_OTHERS = 0.1
"""Cores that others may take: beyond it repeats differ by so much that their spread would excuse any error."""
SETTLE_S = 2.0
"""A server reads its vocabulary in the first second after it is ready."""
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


def judged(runs: list[dict], foreseen: dict) -> dict[str, dict]:
    """Each number of one load against its bound."""
    found = {}
    for (key, part), bound in BOUNDS.items():
        measured = [value(run["bench"], key, part) for run in runs]
        middle, predicted = statistics.median(measured), value(foreseen, key, part)
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


class Meter:
    """Cores that others take meanwhile; nothing where the system does not say.

    Args:
        pid: of the server, whose time is not others'.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.began, self.all, self.stolen = time.monotonic(), *self.machine()
        self.ours = self.own()

    def machine(self) -> tuple[float, float]:
        """Seconds of all processes, and stolen ones, since the start."""
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        except OSError:
            return 0.0, 0.0
        user, nice, system, _, _, irq, softirq, steal = (each / os.sysconf("SC_CLK_TCK") for each in ticks)
        return user + nice + system + irq + softirq, steal

    def own(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        return sum(cpu_seconds(self.pid).values()) + sum(each.ru_utime + each.ru_stime for each in usage)

    def read(self) -> dict[str, float | None]:
        """Since the meter was made."""
        wall = time.monotonic() - self.began
        everything, stolen = self.machine()
        if not everything:
            return {"others_cores": None, "stolen_cores": None}
        others = everything - self.all - (self.own() - self.ours)
        return {
            "others_cores": round(max(0.0, others) / wall, 3),
            "stolen_cores": round((stolen - self.stolen) / wall, 3),
        }


def calibrate(folder: Path, *ledgers: Path) -> tuple[dict, list[str]]:
    """The fit, and the simulated engine's flags."""
    cost = folder / "cost.json"
    fit = foliolm("calibrate", *ledgers, "--out", cost)
    return fit, describe(cost, folder)


def work_of(requests: int, rate: float) -> list[object]:
    return ["--requests", requests, *JUDGE, "--seed", 77, "--rate", rate]


def one_round(args: argparse.Namespace, folder: Path, number: int, loads: list[float]) -> None:
    """The loops, a load, the loops, a load, …, the loops."""
    here = folder / f"round-{number}"
    flags = [*ENGINE, f"--kernels={args.kernels}", "--no-self-calibration", "--ledger", str(here / "whole")]
    quiet = []
    with server(flags) as (host, port, pid):
        time.sleep(SETTLE_S)
        url = f"http://{host}:{port}"

        def calibrating(turn: int) -> None:
            before = sizes(here / "whole")
            quiet.append(loops(url, args.scale, 100 * number + 20 * turn, pid))
            take(here / "whole", before, here / "books")

        for turn, load in enumerate(loads if number % 2 else reversed(loads)):
            calibrating(turn)
            saturated = saturation(args, folder, here / "books")
            meter = Meter(pid)
            bench = foliolm("bench", url, *work_of(requests_of(args), load * saturated))
            (here / f"load-{load}.json").write_text(json.dumps({"load": load, "bench": bench, **meter.read()}))
            short = {f"{key}.{part}": round(value(bench, key, part), 4) for key, part in BOUNDS}
            print(f"round {number}, load {load}: {short}, {meter.read()}", file=sys.stderr, flush=True)
        calibrating(len(loads))
    (here / "loops.json").write_text(json.dumps(quiet))


def sizes(ledger: Path) -> dict[str, int]:
    """Bytes of the ledger's files; the server is idle, so that all its lines are whole."""
    return {path.name: path.stat().st_size for path in ledger.glob("*.jsonl")}


def take(ledger: Path, before: dict[str, int], out: Path) -> None:
    """Add what was written since to another ledger, whose files begin with the same first line."""
    out.mkdir(exist_ok=True)
    for path in ledger.glob("*.jsonl"):
        written = path.read_bytes()
        begin = before.get(path.name, 0)
        with (out / path.name).open("ab") as file:
            if not file.tell() and begin and path.name.startswith("engine-"):
                file.write(written[: written.index(b"\n") + 1])
            file.write(written[begin:])


def saturation(args: argparse.Namespace, folder: Path, books: Path) -> float:
    """Requests a second, as the first fit in the folder has it."""
    rates = folder / "rates.json"
    if not rates.exists():
        _, engine = calibrate(folder, books)
        found = foliolm("simulate", *engine, *work_of(SATURATING, math.inf))["requests_per_s"]
        rates.write_text(json.dumps({"saturated": found, "scale": args.scale, "kernels": args.kernels}))
    return float(json.loads(rates.read_text())["saturated"])


def loops(url: str, scale: float, seed: int, pid: int) -> dict[str, float | None]:
    """Closed loops; no two of them have the same requests. What others took meanwhile."""
    meter = Meter(pid)
    for senders, count in CLOSED:
        count = max(senders, math.ceil(count * scale))
        foliolm("bench", url, "--concurrency", senders, "--requests", count, *CALIBRATE, "--seed", seed + senders)
    return meter.read()


def requests_of(args: argparse.Namespace) -> int:
    return max(4, round(REQUESTS * args.scale))


def reported(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What all rounds in the folder come to."""
    rounds = sorted(path.parent for path in folder.glob("round-*/loops.json"))
    fit, engine = calibrate(folder, *(each / "books" for each in rounds))
    saturated = json.loads((folder / "rates.json").read_text())["saturated"]
    runs: dict[float, list[dict]] = {}
    for path in sorted(each for round_ in rounds for each in round_.glob("load-*.json")):
        run = json.loads(path.read_text())
        runs.setdefault(run["load"], []).append(run)
    loads = []
    for load, of_load in sorted(runs.items()):
        foreseen = foliolm("simulate", *engine, *work_of(requests_of(args), load * saturated))
        loads.append(
            {
                "load": load,
                "rate": round(load * saturated, 4),
                "repeats": len(of_load),
                **judged(of_load, foreseen),
                "others_cores": most(of_load, "others_cores"),
                "stolen_cores": most(of_load, "stolen_cores"),
                "client_bottleneck": [sign for run in of_load for sign in run["bench"]["client"]["bottleneck"]],
            }
        )
    quiet = [each for round_ in rounds for each in json.loads((round_ / "loops.json").read_text())]
    taken = most([*quiet, *(run for of_load in runs.values() for run in of_load)], "others_cores")
    alone = taken is None or taken <= MOST_OTHERS
    return {
        "requests": requests_of(args),
        "saturation_requests_per_s": round(saturated, 4),
        "calibration": {
            **{name: fit[name] for name in ("steps", "held_out", "slowdown", "host_gap_s", "http_s", "delivery_s")},
            "others_cores": most(quiet, "others_cores"),
            "stolen_cores": most(quiet, "stolen_cores"),
        },
        "loads": loads,
        "quiet": alone,
        "met": alone and all(part["met"] for each in loads for part in each.values() if isinstance(part, dict)),
    }


def most(runs: list[dict], name: str) -> float | None:
    return max((run[name] for run in runs if run[name] is not None), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests")
    parser.add_argument("--repeats", type=int, default=3, help="of this call")
    parser.add_argument("--loads", default="0.5,0.8,1.1", help="shares of saturation")
    parser.add_argument("--kernels", default="auto", help="of the served engine")
    parser.add_argument("--keep", type=Path, help="a folder for the repeats, which later calls add to")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    loads = [float(load) for load in args.loads.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "rates.json").exists():
            before = json.loads((folder / "rates.json").read_text())
            if (before["scale"], before["kernels"]) != (args.scale, args.kernels):
                raise SystemExit(f"{folder} holds repeats of --scale {before['scale']} --kernels {before['kernels']}")
        done = len(list(folder.glob("round-*")))
        for number in range(done + 1, done + 1 + args.repeats):
            one_round(args, folder, number, loads)
        report = reported(args, folder)
    print(json.dumps(report) if args.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
