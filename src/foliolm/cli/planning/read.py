"""``foliolm plan read``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    BlockSize,
    Context,
    Json,
    KVCacheDtype,
    MaybeDevice,
    Model,
    Quantization,
    TensorParallel,
    integers,
    setting,
)
from foliolm.cli.planning.show import show
from foliolm.plan.read import plan_read

EXAMPLE = (
    "Example: foliolm plan read --model qwen3-8b --context 2048 --batch 1,16,32,64 --device h100-sxm --plot read.png"
)


def read(
    model: Model,
    context: Context = 2048,
    batch: Annotated[str, typer.Option(help="Batch sizes (sequences a step), with commas between.")] = "1,16,32,64",
    device: MaybeDevice = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    block_size: BlockSize = 16,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve to this file, .png or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Bytes that decode reads for each token it yields: weights shared by the batch, KV not; the knee between them."""
    chosen = setting(model, device, quantization, kv_cache_dtype, tensor_parallel_size, block_size)
    batches = integers("batch", batch)
    report = plan_read(chosen, context, batches)
    if plot is not None:
        from foliolm.plan.plot import plot_read

        plot_read(plot, chosen, report, batches)
        typer.echo(f"drawn: {plot}", err=True)
    show(report, as_json)
