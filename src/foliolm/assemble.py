"""The one place that builds an engine from its settings; everybody who has an engine got it here."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from foliolm.core.clock import MonotonicClock
from foliolm.core.config import EngineConfig
from foliolm.core.errors import ConfigError
from foliolm.core.resolve import Limits, resolve_limits, resolve_scheduler
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.kv import KVManager
from foliolm.ledger.ledger import Ledger
from foliolm.scheduler import Scheduler

if TYPE_CHECKING:
    from foliolm.core.grammar import Grammars
    from foliolm.executor.torch.memory import MemorySum
    from foliolm.model.decoder import DecoderModel
    from foliolm.weights.checkpoint import ModelFiles

RATE_CHUNK = 256
"""Tokens of the prompt chunk by which the device's prefill rate is measured: long enough to be compute-bound."""

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, engine_index: int = 0, report: Callable[[str], None] = logger.info) -> Engine:
    """Load the model, size the KV pool, warm up, and compose an engine that is ready for requests.

    What the flags and the model's headers alone can refuse is refused before a weight is read.

    Args:
        config: the settings; its model must be on this machine already.
        engine_index: which engine of the client's list this is.
        report: takes a line about the start-up at a time.

    Raises:
        ConfigError: settings contradict each other, the model or the memory.
        ModelError: the model's files are wrong, or it cannot be run.
    """
    from foliolm.executor.torch.executor import TorchExecutor
    from foliolm.model.loader import check_runnable
    from foliolm.weights.store import open_model

    files = open_model(config.model, load_format=config.load_format)
    check_runnable(files.shape)
    limits = resolve_limits(config, files.shape.max_position_embeddings)

    threads = _use_threads(config)
    model = _load(config, files, report)
    rate = None if limits.max_num_batched_tokens else _prefill_rate(model, config.block_size)
    memory = _size_pool(config, limits, model, rate)
    settings, reasons = resolve_scheduler(config, limits, memory.num_blocks, rate)
    for line in memory.describe().splitlines():
        report(line)

    grammars = _grammars(files)
    executor = TorchExecutor(
        model,
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        depth=config.pipeline_depth,
        seed=config.seed,
        grammars=grammars,
    )
    seconds = executor.warm_up(settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len)
    report(f"warmed up in {seconds:.1f} s")

    dtype = str(model.dtype).removeprefix("torch.")
    info = EngineInfo(
        model=str(files.source),
        max_model_len=settings.max_model_len,
        vocab_size=files.num_tokens,
        block_size=settings.block_size,
        num_kv_blocks=memory.num_blocks - 1,
        dtype=dtype,
        summary=(
            *memory.describe().splitlines(),
            f"{dtype} on {model.device.type}, {threads} threads, {settings.mode} batching",
            *limits.reasons,
            *reasons,
        ),
    )
    scheduler = Scheduler(settings, KVManager(executor.kv.specs, memory.num_blocks, settings.block_size))
    return Engine(scheduler, executor, MonotonicClock(), Ledger(engine_index), info, config.pipeline_depth, grammars)


def _use_threads(config: EngineConfig) -> int:
    """Compute threads: as many as the user says, else as cores that this process may use."""
    import torch

    threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def _load(config: EngineConfig, files: ModelFiles, report: Callable[[str], None]) -> DecoderModel:
    import torch

    from foliolm.model.loader import dummy_model, load_model, resolve_dtype

    if config.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    elif config.device in ("cpu", "cuda"):
        device = torch.device(config.device)
    else:
        raise ConfigError(f"--device is {config.device!r}; it must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but this PyTorch finds no CUDA device")
    dtype = resolve_dtype(config.dtype, device)
    began = time.perf_counter()
    if files.format == "dummy":
        model = dummy_model(files.shape, dtype=dtype, device=device, num_tokens=files.num_tokens)
    else:
        model = load_model(
            files.shape,
            files.iter_tensors(),
            dtype=dtype,
            device=device,
            num_tokens=files.num_tokens,
            rope_freqs=files.rope_factors,
        )
    report(f"{'made up' if files.format == 'dummy' else 'loaded'} {files.name} in {time.perf_counter() - began:.1f} s")
    return model


def _grammars(files: ModelFiles) -> Grammars:
    """Compiles what answers must follow; the model's tokenizer is read when the first request asks for that."""
    from foliolm.text.grammar import CompiledGrammars, GrammarsOnDemand

    def load() -> CompiledGrammars:
        from foliolm.text.load import load_text

        tokenizer, _ = load_text(files)
        return CompiledGrammars(tokenizer, files.eos_token_ids)

    return GrammarsOnDemand(load)


def _prefill_rate(model: DecoderModel, block_size: int) -> float:
    """Tokens a second that the model prefills, measured on a small pool of its own: the real one needs the budget."""
    from foliolm.executor.torch.executor import TorchExecutor

    probe = TorchExecutor(model, num_blocks=-(-RATE_CHUNK // block_size) + 1, block_size=block_size)
    try:
        return probe.measure_prefill_rate(RATE_CHUNK)
    finally:
        probe.close()


def _size_pool(config: EngineConfig, limits: Limits, model: DecoderModel, rate: float | None) -> MemorySum:
    from foliolm.core.resolve import default_budget
    from foliolm.executor.torch.memory import size_kv_pool

    budget = limits.max_num_batched_tokens or default_budget(rate or 0.0, limits.max_num_seqs)
    return size_kv_pool(
        model,
        block_size=config.block_size,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=limits.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
