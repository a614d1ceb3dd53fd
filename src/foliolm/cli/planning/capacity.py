"""``foliolm plan capacity``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    ActivationsGib,
    BatchedTokens,
    BlockSize,
    Context,
    DeviceName,
    Json,
    KVCacheDtype,
    Model,
    OtherGib,
    Quantization,
    TensorParallel,
    Utilization,
    memory_options,
    setting,
)
from foliolm.cli.planning.show import show
from foliolm.plan.capacity import plan_capacity

EXAMPLE = "Example: foliolm plan capacity --model qwen3-8b --device h100-sxm --context 8192 --kv-cache-dtype fp8"


def capacity(
    model: Model,
    device: DeviceName,
    context: Context = 8192,
    gpu_memory_utilization: Utilization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    quantization: Quantization = None,
    tensor_parallel_size: TensorParallel = 1,
    max_num_batched_tokens: BatchedTokens = 8192,
    max_num_seqs: Annotated[int | None, typer.Option(help="Cap on sequences a step [none].")] = None,
    sequences: Annotated[int | None, typer.Option(help="Say how many devices hold this many at once.")] = None,
    block_size: BlockSize = 16,
    other_gib: OtherGib = 1.0,
    activations_gib: ActivationsGib = None,
    as_json: Json = False,
) -> None:
    """The memory sum line by line, and how many sequences fit. Bytes are one device's."""
    chosen = setting(model, device, quantization, kv_cache_dtype, tensor_parallel_size, block_size)
    options = memory_options(
        gpu_memory_utilization, max_num_batched_tokens, other_gib, activations_gib, max_num_seqs or 256
    )
    show(plan_capacity(chosen, context, options, max_num_seqs, sequences), as_json)
