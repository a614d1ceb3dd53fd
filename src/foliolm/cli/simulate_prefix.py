"""``foliolm simulate prefix``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: foliolm simulate prefix --trace conversation_trace.jsonl --format mooncake --cache-blocks 10000"


def prefix(
    trace: Annotated[
        Path, typer.Option(help="JSON lines with input_length (tokens) and hash_ids; for vllm-run also its folder.")
    ],
    format: Annotated[
        str, typer.Option(help="mooncake (an id stands for 512 tokens) or vllm-run (16 tokens).", show_default=False)
    ],
    cache_blocks: Annotated[
        int | None, typer.Option(help="Blocks that the cache keeps; default: all.", min=1, show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """What a prefix cache would find in a trace: ratios from 0 to 1, tokens and blocks.

    The engine's own prefix index, without an engine: each request looks up its blocks, then all of them are kept, and
    the oldest over the limit are dropped.
    """
    from foliolm.simulate.prefix_replay import replay_prefixes
    from foliolm.simulate.prefix_traces import BLOCK_TOKENS, read_prefix_chains

    said = replay_prefixes(read_prefix_chains(trace, format), BLOCK_TOKENS.get(format, 1), cache_blocks)
    if as_json:
        print(json.dumps(said.to_json(), allow_nan=False))
        return
    from rich.console import Console

    room = "all blocks kept" if cache_blocks is None else f"{cache_blocks:,} blocks kept"
    Console().print(
        f"{said.requests:,} requests, {room}: {said.hit_tokens:,} of {said.prompt_tokens:,} prompt tokens found "
        f"({said.token_hit_ratio:.2%}), {said.hit_blocks:,} of {said.prompt_blocks:,} blocks "
        f"({said.block_hit_ratio:.2%}); {said.distinct_blocks:,} distinct blocks, {said.evicted_blocks:,} dropped",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
