"""A handful of steps measured before the first request, so that predictions start from this machine."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from foliolm.core.machine import MachineLimits
from foliolm.executor.torch.executor import TorchExecutor
from foliolm.executor.torch.kv_tensors import DTYPE_NAMES
from foliolm.ledger.accounts import ModelAccount, account
from foliolm.ledger.host_link import HostLink
from foliolm.ledger.samples import Sample
from foliolm.ledger.step_cost import StepCost
from foliolm.model.decoder import Model
from foliolm.model.native import NativeModel
from foliolm.ops.native.abi import Format
from foliolm.ops.native.library import Library
from foliolm.ops.native.rates import product_rate, read_rate
from foliolm.shape.device import Device
from foliolm.shape.probed import probe_path, probed_device

MATMUL_SIDE, GPU_MATMUL_SIDE = 1024, 4096
READ_BYTES, GPU_READ_BYTES = 64 << 20, 512 << 20
"""What is multiplied and read to measure a device through PyTorch; more on a GPU, whose launches take microseconds."""
ENOUGH_SECONDS = 1.5
"""The measurement ends with the step in which this is exceeded."""
ROUNDS = 3
LINK_BLOCKS = 64
"""Blocks that are moved to measure the way to the host."""


def loaded_account(model: Model) -> ModelAccount:
    """The account of the model as it lies in memory, which need not be as it lies in its files."""
    kv = DTYPE_NAMES[model.kv_dtype]
    if isinstance(model, NativeModel):
        body, head = model.bits
        held = replace(model.shape, weight_dtype=model.weights_name, weight_bits=body, embedding_bits=head)
        return account(held, kv_cache_dtype=kv)
    dtype = DTYPE_NAMES[model.dtype]
    held = replace(model.shape, weight_dtype=dtype, weight_bits=8.0 * model.dtype.itemsize, embedding_bits=None)
    return account(held, kv_cache_dtype=kv)


def measure_device(model: Model) -> Device:
    """The machine's rates: what ``foliolm probe`` kept, where that is of this kind of device, else a quick look."""
    kind = "gpu" if model.device.type == "cuda" else "cpu"
    if probe_path().is_file():
        probed = probed_device()
        if probed.kind == kind:
            return probed
    bandwidth, flops = _torch_rates(model.device, model.dtype, torch.get_num_threads())
    is_float32 = model.dtype == torch.float32
    return Device(
        id="this-machine",
        name=f"this machine's {model.device.type}",
        kind=kind,
        memory_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        bandwidth_gbps=bandwidth / 1e9,
        confidence="measured",
        source="a quick look at start-up",
        fp32_tflops=flops / 1e12 if is_float32 else None,
        bf16_tflops_dense=None if is_float32 else flops / 1e12,
    )


def measure_limits(model: Model) -> MachineLimits:
    """How fast this machine reads and multiplies, in the model's format, with as many threads as its steps have.

    Through the native kernels where they walk the model, else through PyTorch; a process measures once.
    """
    threads = torch.get_num_threads()
    if isinstance(model, NativeModel):
        form = model.body_format
        read, flops = _native_rates(model.library, form, threads)
        compute = f"{model.library.name} kernels, {form.name.lower()} weights"
    else:
        read, flops = _torch_rates(model.device, model.dtype, threads)
        compute = f"PyTorch on {model.device.type}, {DTYPE_NAMES[model.dtype]}"
    where = f"{threads} threads" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    return MachineLimits(read, flops, compute, f"measured at start-up, {where}")


@functools.cache
def _native_rates(library: Library, form: Format, threads: int) -> tuple[float, float]:
    """Bytes and operations a second of the kernels."""
    return read_rate(library, threads), product_rate(library, form, threads)


@functools.cache
def _torch_rates(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, float]:
    """Bytes and operations a second of PyTorch; ``threads`` only tells settings apart."""
    side, num_bytes = (GPU_MATMUL_SIDE, GPU_READ_BYTES) if device.type == "cuda" else (MATMUL_SIDE, READ_BYTES)
    a = torch.ones(side, side, dtype=dtype, device=device)
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    flops = 2.0 * side**3 / _best(device, lambda: torch.mm(a, a))
    return num_bytes / _best(device, lambda: data.sum()), flops


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of three runs, after one that does not count."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def measure_steps(
    executor: TorchExecutor, cost: StepCost, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> list[Sample]:
    """Time steps of decodes, of one chunk, and of both, at a few sizes; the fastest of the rounds counts.

    No request may be live: blocks from 1 on are written.

    Args:
        executor: warmed up.
        cost: counts the rows.
        max_num_batched_tokens, max_num_seqs, max_model_len: no step goes beyond them.
    """
    shapes = _shapes(max_num_batched_tokens, max_num_seqs, max_model_len)
    usable = executor.kv.num_blocks - 1
    size = executor.kv.block_size
    shapes = [rows for rows in shapes if sum(-(-(new + context) // size) for new, context in rows) <= usable]
    best = [float("inf")] * len(shapes)
    began = time.perf_counter()
    for index, rows in list(enumerate(shapes)) * ROUNDS:
        best[index] = min(best[index], executor.time_rows(rows))
        if time.perf_counter() - began > ENOUGH_SECONDS:
            break
    samples = []
    for rows, seconds in zip(shapes, best, strict=True):
        if seconds == float("inf"):
            continue
        decodes = [context for new, context in rows if new == 1]
        counts = cost.counts(decodes, [(new, context) for new, context in rows if new > 1])
        samples.append(Sample(replace(counts, sampled=len(rows)), seconds))
    return samples


def measure_link(executor: TorchExecutor, num_host_blocks: int) -> HostLink | None:
    """The way to the host's memory as block moves see it; None without a host pool. No request may be live."""
    blocks = min(LINK_BLOCKS, num_host_blocks, executor.kv.num_blocks - 1)
    if blocks < 1:
        return None
    moved = 2 * blocks * sum(spec.bytes_per_block(executor.kv.block_size) for spec in executor.kv.specs)
    return HostLink(moved / executor.time_swaps(blocks), efficiency=1.0, copy_s=0.0, copies_per_block=1)


def _shapes(tokens: int, seqs: int, length: int) -> list[list[tuple[int, int]]]:
    """Rows (new, context) of the steps to time."""
    short, long = min(31, length - 1), min(511, length - 1)
    batches = sorted({min(b, seqs, tokens) for b in (1, 2, 4, 8, 16)})
    decodes = [[(1, context)] * batch for batch in batches for context in (short, long)]
    chunks = sorted({min(p, tokens, length - 1) for p in (16, 64, 128, 256)})
    prompts = [[(chunk, 0)] for chunk in chunks]
    prompts += [[(chunk, min(512, length - chunk))] for chunk in chunks[-2:] if length > chunk]
    batch = max(1, min(4, seqs - 1, tokens - 16))
    mixed = [[(1, context)] * batch + [(min(64, tokens - batch), 0)] for context in (short, long)]
    mixed = mixed if seqs > 1 and tokens > batch + 1 else []
    # Should the time not suffice for all: most steps are decodes, and short; one long prompt can use the time up.
    return [*decodes, *prompts[:2], *mixed, *prompts[2:]]
