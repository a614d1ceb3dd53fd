"""Made-up measured steps of a known step cost."""

from __future__ import annotations

import random
from dataclasses import replace

from foliolm.ledger.samples import Sample
from foliolm.ledger.step_cost import StepCost


def made_steps(cost: StepCost, count: int = 400, noise: float = 0.0, seed: int = 1, most: int = 64) -> list[Sample]:
    """Steps of all kinds: their counts, and the seconds that ``cost`` says, with relative noise."""
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        kind = ("decode", "prefill", "mixed")[index % 3]
        decodes = [] if kind == "prefill" else [rng.randrange(1, 4000)] * rng.randrange(1, most)
        chunks = [] if kind == "decode" else [(rng.choice((16, 100, 400, 1000)), rng.choice((0, 0, 500, 2000)))]
        counts = cost.counts(decodes, chunks * rng.randrange(1, 3), sampled_prefills=rng.randrange(2) if chunks else 0)
        seconds = cost.seconds(counts)
        samples.append(Sample(counts, seconds * (1 + rng.uniform(-noise, noise))))
    return samples


def with_coefficients(cost: StepCost, **changed: float) -> StepCost:
    return replace(cost, coefficients=replace(cost.coefficients, **changed))
