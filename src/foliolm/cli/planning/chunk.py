"""``foliolm plan chunk``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    Context,
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
from foliolm.plan.chunk import plan_chunk, plan_chunk_at_rate

EXAMPLE = "Example: foliolm plan chunk --prefill-rate 520 --prompt 30720 --chunk 4096 --itl-target-s 0.2"


def chunk(
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")],
    chunk: Annotated[int, typer.Option(help="Prefill tokens a step.")],
    prefill_rate: Annotated[float | None, typer.Option(help="Measured prefill, tokens a second.")] = None,
    step_overhead_s: Annotated[
        float, typer.Option(help="Seconds of each step beside its tokens (with --prefill-rate).")
    ] = 0.0,
    model: MaybeModel = None,
    device: MaybeDevice = None,
    running: Annotated[int, typer.Option(help="Sequences decoding in each step (with a model).")] = 0,
    context: Context = 2048,
    itl_target_s: Annotated[float | None, typer.Option(help="Longest gap, in seconds, that streams may see.")] = None,
    ttft_target_s: Annotated[
        float | None, typer.Option(help="Seconds to first token: how many prompt tokens may queue under it.")
    ] = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    as_json: Json = False,
) -> None:
    """The gaps that a chunked prefill opens in running streams, and what chunking costs the prompt itself."""
    if (prefill_rate is None) == (model is None):
        raise ConfigError("give either prefill_rate, or model and device")
    if prefill_rate is not None:
        report = plan_chunk_at_rate(prefill_rate, prompt, chunk, itl_target_s, step_overhead_s, ttft_target_s)
    else:
        chosen = setting(model or "", device, quantization, kv_cache_dtype, tensor_parallel_size)
        report = plan_chunk(chosen, prompt, chunk, itl_target_s, running, context, ttft_target_s)
    show(report, as_json)
