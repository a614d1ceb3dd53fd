"""A bar on stderr while a benchmark runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 0.2


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int, int, int], None]]:
    """Yields what takes (ended, failed, running). It draws only when told, so that it never takes time of its own."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("benching"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[running]} running, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total, running=0, failed=0)
        shown = 0.0

        def show(ended: int, failed: int, running: int) -> None:
            nonlocal shown
            if time.monotonic() - shown > EVERY_S:
                bar.update(task, completed=ended, failed=failed, running=running, refresh=bar.console.is_terminal)
                shown = time.monotonic()

        yield show
