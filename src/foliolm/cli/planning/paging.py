"""``foliolm plan paging``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foliolm.cli.planning.options import BlockSize, Json, integers
from foliolm.cli.planning.show import show
from foliolm.core.errors import ConfigError
from foliolm.plan.lengths import lengths_of_trace
from foliolm.plan.paging import plan_paging

EXAMPLE = "Example: foliolm plan paging --lengths 9,13,5,15 --max-len 16 --block-size 4 --sweep"


def paging(
    lengths: Annotated[str | None, typer.Option(help="Tokens of each sequence, with commas between.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Lengths from a trace: CSV or JSON lines with tokens in and out, or numbers.")
    ] = None,
    max_len: Annotated[int | None, typer.Option(help="Tokens reserved for each sequence [the longest].")] = None,
    block_size: BlockSize = 16,
    sweep: Annotated[bool, typer.Option("--sweep", help="Compare block sizes of 1 to 256 tokens.")] = False,
    common_prefix: Annotated[
        int | None, typer.Option(help="Leading tokens that equal those of a cached sequence: how many of them hit.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory that blocks save against whole reservation, and what smaller blocks cost."""
    if (lengths is None) == (trace is None):
        raise ConfigError("give either lengths or trace")
    tokens = integers("lengths", lengths) if lengths is not None else lengths_of_trace(trace or Path())
    show(plan_paging(tokens, block_size, max_len, sweep, common_prefix), as_json)
