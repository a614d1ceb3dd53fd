"""``foliolm plan chat``."""

from __future__ import annotations

from typing import Annotated

import typer

from foliolm.cli.planning.options import (
    ActivationsGib,
    BatchedTokens,
    BlockSize,
    DeviceName,
    Json,
    KVCacheDtype,
    Model,
    OtherGib,
    Quantization,
    TensorParallel,
    Utilization,
    bytes_of_gib,
    memory_options,
    setting,
)
from foliolm.cli.planning.show import show
from foliolm.plan.chat import Chat, Targets
from foliolm.plan.chat_report import plan_chat

EXAMPLE = (
    "Example: foliolm plan chat --model qwen3-8b --device h100-sxm --users 200 --system-tokens 1000 --user-tokens 200 "
    "--assistant-tokens 300 --turns 8 --think-time-s 30 --ttft-target-s 1 --itl-target-s 0.05"
)


def chat(
    model: Model,
    device: DeviceName,
    users: Annotated[int, typer.Option(help="Users at once.")],
    system_tokens: Annotated[int, typer.Option(help="Tokens of the system prompt that all share.")] = 0,
    user_tokens: Annotated[int, typer.Option(help="Tokens of a user's turn.")] = 200,
    assistant_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 300,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 8,
    think_time_s: Annotated[float, typer.Option(help="Mean seconds between an answer and the next turn.")] = 30.0,
    ttft_target_s: Annotated[float | None, typer.Option(help="Mean seconds to first token to keep [none].")] = None,
    itl_target_s: Annotated[float | None, typer.Option(help="Mean seconds between tokens to keep [none].")] = None,
    host_gib: Annotated[float, typer.Option(help="GiB of host memory that the host-tier lever may use.")] = 64.0,
    gpu_memory_utilization: Utilization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    quantization: Quantization = None,
    tensor_parallel_size: TensorParallel = 1,
    max_num_batched_tokens: BatchedTokens = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that a step may hold.")] = 256,
    block_size: BlockSize = 16,
    other_gib: OtherGib = 1.0,
    activations_gib: ActivationsGib = None,
    as_json: Json = False,
) -> None:
    """How many chat users fit: KV kept between turns, prefill after a miss, and what each lever would give."""
    report = plan_chat(
        setting(model, device, quantization, kv_cache_dtype, tensor_parallel_size, block_size),
        Chat(system_tokens, user_tokens, assistant_tokens, turns, think_time_s),
        users,
        Targets(ttft_target_s, itl_target_s),
        memory_options(gpu_memory_utilization, max_num_batched_tokens, other_gib, activations_gib, max_num_seqs),
        bytes_of_gib("host_gib", host_gib),
    )
    show(report, as_json)
