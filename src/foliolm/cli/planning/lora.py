"""``foliolm plan lora``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import Context, Json, KVCacheDtype, MaybeDevice, Model, Quantization, setting, words
from foliolm.cli.planning.show import show
from foliolm.plan.lora import plan_lora

EXAMPLE = (
    "Example: foliolm plan lora --model qwen3-8b --rank 16 --targets q_proj,v_proj --adapters 100 --sequences 100 "
    "--context 8192"
)


def lora(
    model: Model,
    rank: Annotated[int, typer.Option(help="Rank of every adapter.")] = 16,
    targets: Annotated[str, typer.Option(help="Linears that are adapted, with commas between.")] = "q_proj,v_proj",
    adapters: Annotated[int, typer.Option(help="Adapters resident at once.")] = 1,
    sequences: Annotated[int, typer.Option(help="Sequences resident at once.")] = 1,
    context: Context = 2048,
    batch: Annotated[int | None, typer.Option(help="Rows of a step [all sequences].")] = None,
    distinct: Annotated[int | None, typer.Option(help="Adapters that the rows of a step use [the most].")] = None,
    device: MaybeDevice = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    as_json: Json = False,
) -> None:
    """Memory of adapters against memory of KV, and what a step reads of them."""
    chosen = setting(model, device, quantization, kv_cache_dtype)
    show(plan_lora(chosen, rank, words(targets), adapters, sequences, context, batch, distinct), as_json)
