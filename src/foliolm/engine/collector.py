"""Python's collector of garbage cycles beside a running engine."""

from __future__ import annotations

import gc


def pass_over_what_is() -> None:
    """Let collections pass over all objects that there are, once those in dead cycles are gone.

    A process that has loaded a model and its libraries holds hundreds of thousands of objects for good. To walk them
    takes a tenth of a second, and it comes in the middle of a step. Objects that nobody refers to are freed as before.
    """
    gc.collect()
    gc.freeze()


def walk_all_again() -> None:
    """Undo ``pass_over_what_is``."""
    gc.unfreeze()
