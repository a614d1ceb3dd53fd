"""``foliolm plan step``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    Context,
    DeviceName,
    Json,
    KVCacheDtype,
    Model,
    Quantization,
    TensorParallel,
    integers,
    setting,
    words,
)
from foliolm.cli.planning.show import show
from foliolm.core.errors import ConfigError
from foliolm.plan.step import plan_step

EXAMPLE = "Example: foliolm plan step --model qwen3-8b --device h100-sxm --decodes 32 --context 2048 --prefill 512:1024"


def step(
    model: Model,
    device: DeviceName,
    decodes: Annotated[int, typer.Option(help="Decode rows.")] = 0,
    context: Context = 2048,
    prefill: Annotated[
        str, typer.Option(help="Prefill chunks as NEW:CACHED tokens, with commas between, e.g. 512:1024,256:0.")
    ] = "",
    buckets: Annotated[
        str, typer.Option(help="Batch sizes of captured graphs, to which steps of decodes alone are padded.")
    ] = "",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    as_json: Json = False,
) -> None:
    """Predicted seconds of one step, term by term, and what padding costs."""
    chosen = setting(model, device, quantization, kv_cache_dtype, tensor_parallel_size)
    sizes = integers("buckets", buckets) if buckets else []
    show(plan_step(chosen, decodes, context, [_chunk(word) for word in words(prefill)], sizes), as_json)


def _chunk(word: str) -> tuple[int, int]:
    new, colon, cached = word.partition(":")
    try:
        return int(new), int(cached) if colon else 0
    except ValueError:
        raise ConfigError(f"prefill has {word!r}; it must be NEW:CACHED, two whole numbers") from None
