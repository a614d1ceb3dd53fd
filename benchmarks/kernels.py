"""The native kernels of a revision against those at hand: the same steps, alternating in one process.

    python benchmarks/kernels.py --before REVISION [--steps 1x100,1x2048,16x540,2x0+512] [--rounds 40] [--json]

A step is ROWSxCONTEXT (decodes) or ROWSxCONTEXT+NEW (chunks of a prompt behind a context). Each round runs it once on
either library, in an order that turns; `ratio` is the median over the rounds of the pair's times, after / before. The
revision's structures must be those of this binding (the error says where they differ), which limits how old it may be.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from foliolm import LLM
from foliolm.ops.native import library as native
from foliolm.ops.native.build import SOURCES, built_library
from foliolm.ops.native.target import best_target, cpu_features

ROOT = Path(__file__).resolve().parent.parent
MOST_TOKENS = 2048
"""Of a step."""


def sources_of(revision: str, folder: Path) -> Path:
    """The kernels' sources of a revision, in ``folder``."""
    inside = SOURCES.relative_to(ROOT)
    packed = subprocess.run(["git", "archive", revision, str(inside)], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise SystemExit(f"--before is {revision!r}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / inside


def rows_of(step: str) -> list[tuple[int, int]]:
    """(new tokens, tokens before them) of each row."""
    try:
        rows, _, rest = step.partition("x")
        context, _, new = rest.partition("+")
        made = [(int(new or 1), int(context))] * int(rows)
    except ValueError:
        raise SystemExit(f"--steps has {step!r}; it must be ROWSxCONTEXT or ROWSxCONTEXT+NEW") from None
    if not 1 <= sum(new for new, _ in made) <= MOST_TOKENS:
        raise SystemExit(f"--steps has {step!r}; a step has 1 to {MOST_TOKENS} tokens")
    return made


def model_on(path: Path, name: str, model: str) -> LLM:
    """The model on the library at ``path``."""
    library = native.open_library(name, path)
    chosen = native.choose_kernels
    modules = [one for one in list(sys.modules.values()) if getattr(one, "choose_kernels", None) is chosen]
    for module in modules:
        module.choose_kernels = lambda wanted: native.Choice(library, f"kernels of {path}")  # type: ignore[attr-defined]
    try:
        return LLM(model, enable_prefix_caching=False, self_calibration=False, max_num_batched_tokens=MOST_TOKENS)
    finally:
        for module in modules:
            module.choose_kernels = chosen  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="a git revision")
    parser.add_argument(
        "--steps", default="1x100,1x2048,16x540,2x0+512", help="ROWSxCONTEXT[+NEW], with commas between"
    )
    parser.add_argument("--rounds", type=int, default=40, help="pairs of each step")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    steps = {step: rows_of(step) for step in args.steps.split(",")}
    target = best_target(cpu_features())
    with tempfile.TemporaryDirectory() as folder:
        before = built_library(target, sources=sources_of(args.before, Path(folder)))
    executors = [model_on(path, target.name, args.model).engine.executor for path in (before, built_library(target))]
    report = {}
    for step, rows in steps.items():
        times: list[list[float]] = [[], []]
        for round_ in range(args.rounds + 1):
            for side in (0, 1) if round_ % 2 else (1, 0):
                seconds = executors[side].time_rows(rows)
                if round_:  # the first pair warms up
                    times[side].append(seconds * 1e3)
        ratio = statistics.median(after / old for old, after in zip(*times, strict=True))
        report[step] = {
            "before_ms": round(statistics.median(times[0]), 2),
            "after_ms": round(statistics.median(times[1]), 2),
            "ratio": round(ratio, 3),
        }
        print(f"{step:>12}  {report[step]}", file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({"before": args.before, "target": target.name, "rounds": args.rounds, "steps": report}))


if __name__ == "__main__":
    main()
