"""The five offline workloads that FolioLM and its peers are measured on.

Each is a list of (prompt token ids, output tokens); generation is greedy and ignores the end token, so that every
engine does the same work. Token ids are drawn from 100 to 39,999, seeded by name and round: no two workloads or rounds
share a prefix, so that a prefix cache finds only what the workload itself shares.
"""

from __future__ import annotations

import random

NAMES = ("short1", "single2k", "b16", "mix32", "shared16")

Workload = list[tuple[list[int], int]]


def workload(name: str, round_: int = 0) -> Workload:
    """A workload by name; another round is another draw of the same kind."""
    rng = random.Random(f"{name}:{round_}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(count)]

    if name == "short1":  # one chat turn: decode speed of a single stream
        return [(tokens(16), 128)]
    if name == "single2k":  # one long prompt: prefill speed, then decode at 2K context
        return [(tokens(2048), 128)]
    if name == "b16":  # a full batch arriving together
        return [(tokens(512), 64) for _ in range(16)]
    if name == "mix32":  # uneven lengths: what continuous batching is for
        return [(tokens(rng.randrange(64, 512)), 96) for _ in range(32)]
    if name == "shared16":  # one 1,024-token prefix under 16 requests
        prefix = tokens(1024)
        return [(prefix + tokens(32), 32) for _ in range(16)]
    raise SystemExit(f"unknown workload {name!r}; one of {', '.join(NAMES)}")


def report(engine: str, name: str, work: Workload, wall_s: float) -> dict[str, object]:
    """The line that every engine's script prints."""
    prompt, output = sum(len(p) for p, _ in work), sum(n for _, n in work)
    return {
        "engine": engine,
        "workload": name,
        "wall_s": round(wall_s, 4),
        "output_tokens_per_s": round(output / wall_s, 2),
        "total_tokens_per_s": round((output + prompt) / wall_s, 2),
    }
