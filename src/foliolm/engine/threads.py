"""How compute threads wait for each other."""

from __future__ import annotations

import os

SPIN_COUNT = "1000"
"""Turns of GNU OpenMP's waiting loop before a thread sleeps (its own default: about 300,000, some milliseconds)."""


def bound_spinning() -> None:
    """Let OpenMP's threads spin only briefly; call it before torch is imported, or it does nothing.

    A decode step is hundreds of short parallel regions. Where anybody else wants a core (the HTTP process does), the
    default lets a thread that waits burn the core that the one it waits for needs: on a busy two-core machine a step
    took ten times as long. Settings of the user's own are left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
