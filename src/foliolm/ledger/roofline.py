"""How near the machine's limits steps ran: bytes and FLOPs over measured seconds, held against what it can do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foliolm.core.machine import MachineLimits
from foliolm.core.record import StepRecord
from foliolm.ledger.gaps import wall_seconds

SINGLE = "decode of 1"
"""Name of the decode-only steps of one sequence, which are counted among ``decode`` too."""
UNKNOWN = "the machine's limits are unknown: the ledger's header has none"


@dataclass(frozen=True, slots=True)
class Achieved:
    """Steps of one kind against the machine's limits. All but ``steps`` and the words are medians over the steps.

    Attributes:
        kind: ``decode``, ``prefill``, ``mixed``, or ``SINGLE``.
        steps: with known bytes and measured seconds.
        sequences, tokens: rows, and new tokens.
        read_bytes, flops: that a step had to read and to compute.
        seconds: inside the model's calls; the whole step's where its parts were not measured.
        wall_seconds: by the clock: with the step's preparation and sampling, and the host's part before it.
        read_gb_per_s, gflop_per_s: over ``seconds``; 1e9 bytes and 1e9 operations a second.
        wall_read_gb_per_s, wall_gflop_per_s: over ``wall_seconds``.
        bandwidth_share, flops_share: of the machine's limits; None where these are unknown. So with ``wall_``.
        binds: ``bandwidth`` or ``compute``: the limit that is nearer; None where they are unknown.
        words: a sentence.
    """

    kind: str
    steps: int
    sequences: float
    tokens: float
    read_bytes: float
    flops: float
    seconds: float
    wall_seconds: float
    read_gb_per_s: float
    gflop_per_s: float
    wall_read_gb_per_s: float
    wall_gflop_per_s: float
    bandwidth_share: float | None
    flops_share: float | None
    wall_bandwidth_share: float | None
    wall_flops_share: float | None
    binds: str | None
    words: str


def achieved(steps: Sequence[StepRecord], limits: MachineLimits | None) -> tuple[Achieved, ...]:
    """By kind of step: decodes, those of one sequence, prompts, both; kinds that did not run are left out.

    Args:
        steps: in order; those whose bytes nobody counted (no cost model) are passed over.
        limits: of the machine; None: unknown.
    """
    timed = [
        (step, wall)
        for step, wall in zip(steps, wall_seconds(steps), strict=True)
        if step.read_bytes > 0 and step.compute_s > 0
    ]
    by_kind: dict[str, list[tuple[StepRecord, float]]] = {"decode": [], SINGLE: [], "prefill": [], "mixed": []}
    for step, wall in timed:
        by_kind[step.kind].append((step, wall))
        if step.kind == "decode" and step.num_decodes == 1:
            by_kind[SINGLE].append((step, wall))
    return tuple(_of_kind(kind, found, limits) for kind, found in by_kind.items() if found)


def _of_kind(kind: str, timed: Sequence[tuple[StepRecord, float]], limits: MachineLimits | None) -> Achieved:
    median = statistics.median
    steps = [step for step, _ in timed]
    read = median(step.read_rate for step in steps)
    multiplied = median(step.flop_rate for step in steps)
    wall_read = median(step.read_bytes / wall for step, wall in timed)
    wall_multiplied = median(step.flops / wall for step, wall in timed)

    def shares(bytes_per_s: float, flops_per_s: float) -> tuple[float | None, float | None]:
        if limits is None:
            return None, None
        return bytes_per_s / limits.read_bytes_per_s, flops_per_s / limits.flops_per_s

    bandwidth_share, flops_share = shares(read, multiplied)
    wall_bandwidth_share, wall_flops_share = shares(wall_read, wall_multiplied)
    binds = None
    if bandwidth_share is not None and flops_share is not None:
        binds = "bandwidth" if bandwidth_share >= flops_share else "compute"
    by_compute = binds == "compute" or (binds is None and kind == "prefill")
    sequences, tokens = median(step.num_rows for step in steps), median(step.num_tokens for step in steps)
    num_bytes, flops = median(step.read_bytes for step in steps), median(step.flops for step in steps)
    seconds, wall = median(step.compute_s for step in steps), median(wall for _, wall in timed)

    who = _who(kind, sequences, tokens)
    took = f"{seconds * 1e3:,.1f} ms"
    if by_compute:
        did = f"{who} compute {flops / 1e9:,.1f} GFLOP in {took}: {multiplied / 1e9:,.1f} GFLOP/s"
        share, wall_share, verb = flops_share, wall_flops_share, "multiplies"
    else:
        did = f"{who} read {num_bytes / 1e6:,.1f} MB in {took}: {read / 1e9:,.1f} GB/s"
        share, wall_share, verb = bandwidth_share, wall_bandwidth_share, "reads"
    words = did
    if share is not None and wall_share is not None:
        words += f", {share:.0%} of what this machine {verb} ({wall_share:.0%} by the clock, {wall * 1e3:,.1f} ms)"
    return Achieved(
        kind,
        len(steps),
        sequences,
        tokens,
        num_bytes,
        flops,
        seconds,
        wall,
        read / 1e9,
        multiplied / 1e9,
        wall_read / 1e9,
        wall_multiplied / 1e9,
        bandwidth_share,
        flops_share,
        wall_bandwidth_share,
        wall_flops_share,
        binds,
        words,
    )


def _who(kind: str, sequences: float, tokens: float) -> str:
    rows = f"{sequences:g} sequence" + ("" if sequences == 1 else "s")
    if kind in ("decode", SINGLE):
        return f"decode steps of {rows}"
    if kind == "prefill":
        return f"prefill steps of {tokens:,g} tokens"
    return f"mixed steps of {rows} and {tokens:,g} new tokens"
