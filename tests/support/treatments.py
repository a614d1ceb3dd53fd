"""Random ways of giving way."""

from __future__ import annotations

import random

from support.script import MadePrices


def random_treatments(rng: random.Random, usable: int) -> dict:
    """How requests and idle prefixes give way: a host pool of none, a few or enough slots, and prices that favour
    either way.
    """
    return {
        "num_host_blocks": rng.choice([0, rng.randrange(1, usable), 4 * usable]),
        "preemption_mode": rng.choice(["auto", "swap", "swap", "recompute"]),
        "preemption_victim": rng.choice(["auto", "last", "least-computed"]),
        "max_preemptions": rng.choice([1, 3]),
        "kv_offloading": rng.choice(["off", "auto", "always", "always"]),
        "prices": rng.choice([None, MadePrices(rng.choice([0.5, 2.0, 8.0]))]),
    }
