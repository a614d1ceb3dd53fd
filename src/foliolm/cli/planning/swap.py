"""``foliolm plan swap``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    BatchedTokens,
    BlockSize,
    Context,
    DeviceName,
    Json,
    KVCacheDtype,
    Model,
    Quantization,
    TensorParallel,
    setting,
)
from foliolm.cli.planning.show import show
from foliolm.ledger.treatments import Running
from foliolm.plan.swap import plan_swap

EXAMPLE = "Example: foliolm plan swap --model qwen3-8b --device h100-sxm --tokens 4096 --running 32 --context 1024"


def swap(
    model: Model,
    device: DeviceName,
    tokens: Annotated[int, typer.Option(help="Tokens of the request whose KV has to go.")],
    cached_tokens: Annotated[
        int, typer.Option(help="Leading tokens that the prefix cache would give back on recomputation.")
    ] = 0,
    running: Annotated[int, typer.Option(help="Sequences decoding while it is brought back.")] = 32,
    context: Context = 1024,
    max_num_batched_tokens: BatchedTokens = 8192,
    ttft_target_s: Annotated[
        float | None, typer.Option(help="Seconds that may be spent; if neither keeps it: refuse.")
    ] = None,
    copy_s: Annotated[float, typer.Option(help="Seconds to start one copy.")] = 5e-6,
    copies_per_block: Annotated[int | None, typer.Option(help="Copies that move one block [one a layer].")] = None,
    overlap_s: Annotated[float, typer.Option(help="Seconds of copying that run under computation.")] = 0.0,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    block_size: BlockSize = 16,
    as_json: Json = False,
) -> None:
    """Swap a preempted request's KV to the host and back, or compute it again: which is cheaper, and from where on."""
    chosen = setting(model, device, quantization, kv_cache_dtype, tensor_parallel_size, block_size)
    others = Running(running, context, max_num_batched_tokens)
    report = plan_swap(chosen, tokens, cached_tokens, others, ttft_target_s, copy_s, copies_per_block, overlap_s)
    show(report, as_json)
