"""``foliolm plan latency``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    Json,
    KVCacheDtype,
    MaybeDevice,
    MaybeModel,
    Quantization,
    TensorParallel,
    setting,
)
from foliolm.cli.planning.show import show
from foliolm.core.errors import ConfigError
from foliolm.plan.latency import Measured, plan_latency

EXAMPLE = (
    "Example: foliolm plan latency --queue-s 0.1 --prefill-s 0.096 --itl-s 0.0265 --output-tokens 256 "
    "--model qwen3-8b --device rtx-pro-6000-ws --input-tokens 2048"
)


def latency(
    output_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 256,
    queue_s: Annotated[float, typer.Option(help="Seconds before the prefill starts.")] = 0.0,
    prefill_s: Annotated[float | None, typer.Option(help="Measured seconds of the prefill [predicted].")] = None,
    itl_s: Annotated[float | None, typer.Option(help="Measured mean seconds between tokens [predicted].")] = None,
    model: MaybeModel = None,
    device: MaybeDevice = None,
    input_tokens: Annotated[int | None, typer.Option(help="Tokens of the prompt; needed with a model.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences decoding in each step, this one included.")] = 1,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Chunk the predicted prefill by this many tokens a step [whole and alone].")
    ] = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    as_json: Json = False,
) -> None:
    """Time to first token, decode time and the whole; with a device, what measured times say binds it."""
    if model is None and device is not None:
        raise ConfigError("model is missing; a device alone says nothing of a request")
    chosen = None
    if model is not None:
        chosen = setting(model, device, quantization, kv_cache_dtype, tensor_parallel_size)
    report = plan_latency(
        output_tokens, queue_s, Measured(prefill_s, itl_s), chosen, input_tokens, batch, max_num_batched_tokens
    )
    show(report, as_json)
