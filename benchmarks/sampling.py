"""What drawing tokens costs a step: PyTorch's operators and the native kernels, on the same logits and requests.

    python benchmarks/sampling.py [--rounds 25] [--threads 2] [--json]

A case is so many rows of a vocabulary, with one way of cutting it. Logits are made up: ``text`` falls with a token's
rank as −1.5·ln(rank), roughly as a language model's do; ``flat`` are standard normal, so that most of the vocabulary is
needed to reach a top-p. What is timed is ``Sampler.sample``, from logits to tokens, everything included; medians, in
milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import torch

from foliolm.core.plan import Admission
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.requests import RequestTable
from foliolm.executor.torch.sampler import Sampler
from foliolm.ops.native.library import choose_kernels

CUTS = {
    "temperature alone": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 40, top_p 0.9, min_p 0.05": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
}
VOCABULARIES, ROWS, KINDS = (151_936, 49_152), (1, 16), ("text", "flat")


def made_up(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    """[rows, vocabulary] float32."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, vocabulary, generator=generator)
    if kind == "flat":
        return noise
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)]) + 1
    return 0.3 * noise - 1.5 * torch.log(ranks.float())


def milliseconds(sampler: Sampler, table: RequestTable, logits: torch.Tensor, rounds: int) -> float:
    """Of one call: the median of the rounds, after two that warm it up."""
    slots, taken = table.slots(range(len(logits))), []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        sampler.sample(logits, slots)
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="calls a case and way")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = choose_kernels("native").library
    assert kernels is not None
    cases = []
    for kind in KINDS:
        for vocabulary in VOCABULARIES:
            for rows in ROWS:
                logits = made_up(kind, rows, vocabulary)
                for cut, fields in CUTS.items():
                    table = RequestTable(1, vocabulary, seed=0)
                    for i in range(rows):
                        table.admit(Admission(i, (1,), 1, SamplingParams(temperature=0.8, **fields), ()))
                    with torch.inference_mode():
                        ms = {
                            "pytorch": milliseconds(Sampler(table), table, logits, args.rounds),
                            "native": milliseconds(Sampler(table, kernels), table, logits, args.rounds),
                        }
                    cases.append({"logits": kind, "vocabulary": vocabulary, "rows": rows, "cut": cut, **ms})
                    print(f"{kind} {vocabulary} x {rows}, {cut}: {ms}", file=sys.stderr)
    if args.json:
        print(json.dumps({"kernels": kernels.name, "threads": args.threads, "unit": "ms a call", "cases": cases}))
        return 0
    print(
        f"| logits | vocabulary | rows | cut | PyTorch, ms | {kernels.name}, ms | times as fast |\n" + "|---" * 7 + "|"
    )
    for case in cases:
        ratio = case["pytorch"] / case["native"]
        print(
            f"| {case['logits']} | {case['vocabulary']:,} | {case['rows']} | {case['cut']} "
            f"| {case['pytorch']:.2f} | {case['native']:.3f} | {ratio:.0f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
