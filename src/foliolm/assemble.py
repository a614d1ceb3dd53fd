"""The one place that builds an engine from its settings; everybody who has an engine got it here."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from foliolm.core.clock import MonotonicClock
from foliolm.core.config import EngineConfig
from foliolm.core.errors import ConfigError, RequestError
from foliolm.core.machine import MachineLimits
from foliolm.core.resolve import Limits, SchedulerConfig, default_budget, resolve_limits, resolve_scheduler
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.executor.cost import CostExecutor
from foliolm.kv import KVManager
from foliolm.ledger.chunk_budget import TargetChunks
from foliolm.ledger.journal import Journal
from foliolm.ledger.ledger import Ledger
from foliolm.ledger.lines import EngineLine
from foliolm.ledger.plan_cost import PlanCost
from foliolm.ledger.prices import LedgerPrices
from foliolm.ledger.step_cost import StepCost
from foliolm.scheduler import Scheduler
from foliolm.version import __version__

if TYPE_CHECKING:
    import torch

    from foliolm.core.adapter import AdapterHost, AdapterSize
    from foliolm.core.grammar import Grammars
    from foliolm.core.kvspec import KVSpec
    from foliolm.core.protocols import Clock, CostModel, Executor
    from foliolm.executor.cost import AdvancingClock
    from foliolm.executor.torch.executor import TorchExecutor
    from foliolm.executor.torch.memory import MemorySum
    from foliolm.model.decoder import Model
    from foliolm.model.native import NativeModel
    from foliolm.ops.native.library import Library
    from foliolm.plan.setting import MemoryOptions, Setting
    from foliolm.weights.checkpoint import ModelFiles

RATE_CHUNK = 256
"""Tokens of the prompt chunk by which the device's prefill rate is measured: long enough to be compute-bound."""
HELD_PER_SLOT = 8
"""Adapters in host memory for each slot of the device, where nobody says."""
PRESET_CHUNK = 2048
"""The same where the device is only described, by its step cost."""

NO_HOST_POOL = "host pool: none (--preemption-mode recompute, and no evicted prefixes are kept)"

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
    from foliolm.executor.torch.memory import size_host_pool
    from foliolm.model.loader import check_runnable
    from foliolm.weights.store import open_model

    files = open_model(config.model, load_format=config.load_format)
    check_runnable(files.shape)
    limits = resolve_limits(config, files.shape.max_position_embeddings)

    threads = _use_threads(config)
    model = _load(config, files, report)
    machine = _machine_limits(model, report)
    rate = None if limits.max_num_batched_tokens else _prefill_rate(model, config.block_size)
    memory = _size_pool(config, limits, model, rate)
    num_host_blocks, host_line = size_host_pool(memory, config.swap_space)
    if not config.wants_host_pool:
        num_host_blocks, host_line = 0, NO_HOST_POOL
    settings, reasons = resolve_scheduler(config, limits, memory.num_blocks, rate, num_host_blocks)
    memory_lines = (*memory.describe().splitlines(), host_line)
    for line in memory_lines:
        report(line)

    grammars = _grammars(files)
    executor = TorchExecutor(
        model,
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        depth=config.pipeline_depth,
        seed=config.seed,
        num_host_blocks=num_host_blocks,
        grammars=grammars,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank,
    )
    seconds = executor.warm_up(settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len)
    report(f"warmed up in {seconds:.1f} s")

    dtype = model.weights_name
    cost, cost_source = _predictor(config, model, executor, settings)
    info = EngineInfo(
        model=str(files.source),
        max_model_len=settings.max_model_len,
        vocab_size=files.num_tokens,
        block_size=settings.block_size,
        num_kv_blocks=memory.num_blocks - 1,
        dtype=dtype,
        summary=(
            *memory_lines,
            f"{dtype} on {model.device.type}, {threads} threads, {settings.mode} batching",
            *limits.reasons,
            *reasons,
        ),
        limits=machine,
    )
    books = Books(cost, cost_source, engine_index, config.ledger, config.itl_target_ms, limits=machine)
    engine = _compose(
        settings,
        executor.kv.specs,
        executor,
        MonotonicClock(),
        info,
        books,
        config.pipeline_depth,
        grammars,
        executor.adapters,
        config.max_cpu_loras or HELD_PER_SLOT * config.max_loras,
    )
    _load_adapters(engine, config, report)
    if config.self_calibration and config.step_cost is None:
        from foliolm.ledger.self_calibration import SelfCalibration

        engine.ledger.on_step.append(SelfCalibration(engine.ledger, cost).take)
    return engine


@dataclass(frozen=True, slots=True)
class Books:
    """How an engine's books are kept.

    Attributes:
        cost: predicts its steps.
        cost_source: ``default``, ``startup``, ``file`` or ``calibrated``.
        engine_index: which engine of the client's list it is.
        ledger: a folder for JSON lines, or None.
        itl_target_ms: see ``EngineConfig``.
        timelines: see ``Ledger``.
        limits: how fast the machine reads and multiplies; None: as fast as the step cost's device.
    """

    cost: StepCost
    cost_source: str = "file"
    engine_index: int = 0
    ledger: str | None = None
    itl_target_ms: float | None = None
    timelines: bool = True
    limits: MachineLimits | None = None


def virtual_scheduler(
    config: EngineConfig, setting: Setting, cost: StepCost, memory: MemoryOptions | None = None
) -> tuple[SchedulerConfig, tuple[str, ...]]:
    """What the scheduler runs with where the device is only described: as for a real engine, by the memory sum.

    Args:
        config: the settings; device and model are those of ``setting``.
        setting: the model as it would be served, and the device.
        cost: predicts the prefill rate, from which an unset token budget follows.
        memory: what of the device's memory is not known by its description; None: the defaults.

    Returns:
        The settings, and a sentence for each that was derived.

    Raises:
        ConfigError: settings contradict each other, the model or the memory.
    """
    from foliolm.ledger.treatments import prefill_seconds
    from foliolm.plan.setting import MemoryOptions, memory_of

    limits = resolve_limits(config, setting.shape.max_position_embeddings)
    rate = PRESET_CHUNK / prefill_seconds(cost, PRESET_CHUNK)
    budget = limits.max_num_batched_tokens or default_budget(rate, limits.max_num_seqs)
    per_block = config.block_size * setting.account.kv_bytes_per_token
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override + 1
        why = f"KV pool: {num_blocks - 1} blocks, by --num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // per_block
        why = f"KV pool: {num_blocks - 1} blocks, by --kv-cache-memory-bytes"
    else:
        options = replace(
            memory or MemoryOptions(),
            gpu_memory_utilization=None if setting.need_device().kind == "cpu" else config.gpu_memory_utilization,
            max_num_batched_tokens=budget,
            max_num_seqs=limits.max_num_seqs,
        )
        found = memory_of(setting, options)
        num_blocks = max(0, found.kv_pool) // per_block
        parts = {"weights": found.weights, "activations": found.activations, "reserve": found.reserve}
        said = ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in parts.items())
        why = f"KV pool: {num_blocks - 1} blocks, of {found.memory / 2**30:.2f} GiB less {said}"
    if num_blocks < 2:
        raise ConfigError(f"no KV fits the device: {why}")
    num_host_blocks, host = _virtual_host_pool(config, setting, cost, per_block)
    settings, reasons = resolve_scheduler(config, limits, num_blocks, rate, num_host_blocks)
    return settings, (why, host, *limits.reasons, *reasons)


def _virtual_host_pool(config: EngineConfig, setting: Setting, cost: StepCost, per_block: int) -> tuple[int, str]:
    """Slots of the host pool, and why so many; as `size_host_pool` where the host's memory is not known."""
    if not config.wants_host_pool:
        return 0, NO_HOST_POOL
    device = setting.need_device()
    if cost.host_link is None:
        if config.preemption_mode == "swap":
            raise ConfigError(f"--preemption-mode is swap, but no link from {device.id} to host memory is known")
        return 0, f"host pool: none (no link from {device.id} to host memory is known)"
    space = config.swap_space
    if space is None:
        space = 4.0 if device.kind == "gpu" else min(4.0, device.memory_bytes / 8 / 2**30)
    blocks = int(space * 2**30) // per_block
    return blocks, f"host pool: {blocks} blocks in {space:g} GiB of host memory"


def build_virtual_engine(
    settings: SchedulerConfig,
    books: Books,
    clock: AdvancingClock,
    host_s: float = 0.0,
    depth: int = 0,
    times: CostModel | None = None,
    adapters: Mapping[int, AdapterSize] | None = None,
) -> Engine:
    """An engine whose steps take the time that a step cost says: everything but executor and clock is the real one.

    Args:
        settings: the scheduler's; ``num_blocks`` and ``block_size`` size the KV pool.
        books: the step cost, and how the books are kept.
        clock: virtual; the executor advances it.
        host_s: seconds that the host needs between two steps.
        depth: steps in flight while the next is planned.
        times: what steps really take, where that is not what the books' step cost predicts: measured kernels, or a
            recorded run.
        adapters: LoRA adapters that requests may name, by load id.
    """
    model = books.cost.model
    info = EngineInfo(
        model.name, settings.max_model_len, model.vocab_size, settings.block_size, settings.num_blocks - 1
    )
    executor = CostExecutor(times or PlanCost(books.cost, adapters), clock, host_s)
    engine = _compose(settings, model.kv, executor, clock, info, books, depth)
    for load_id, size in (adapters or {}).items():
        engine.ledger.add_adapter(load_id, size)
    return engine


def _compose(
    settings: SchedulerConfig,
    specs: Sequence[KVSpec],
    executor: Executor,
    clock: Clock,
    info: EngineInfo,
    books: Books,
    depth: int,
    grammars: Grammars | None = None,
    adapters: AdapterHost | None = None,
    max_cpu_loras: int = 1,
) -> Engine:
    """What real and virtual engines have in common."""
    journal = None if books.ledger is None else Journal(Path(books.ledger), f"engine-{books.engine_index}")
    ledger = Ledger(
        books.engine_index,
        cost=books.cost,
        cost_source=books.cost_source,
        journal=journal,
        block_size=settings.block_size,
        timelines=books.timelines,
        limits=books.limits or _described_limits(books.cost),
    )
    if journal is not None:
        started = clock.now()
        journal.header = lambda: EngineLine(
            engine=books.engine_index,
            started_ns=started,
            wall_ns=time.time_ns(),
            monotonic_ns=clock.now(),
            model=info.model,
            dtype=info.dtype,
            scheduler=settings,
            cost=ledger.cost,
            cost_source=ledger.cost_source,
            depth=depth,
            version=__version__,
            itl_target_ms=books.itl_target_ms,
            limits=ledger.limits,
        )
    chunks = None
    if books.itl_target_ms is not None:
        chunks = TargetChunks(ledger, books.itl_target_ms / 1e3)
        ledger.on_step.append(chunks.observe)
    prices = LedgerPrices(ledger, settings.block_size, settings.max_num_batched_tokens)
    scheduler = Scheduler(settings, KVManager(specs, settings.num_blocks, settings.block_size), chunks, prices)
    return Engine(scheduler, executor, clock, ledger, info, depth, grammars, adapters, max_cpu_loras)


def _load_adapters(engine: Engine, config: EngineConfig, report: Callable[[str], None]) -> None:
    """The adapters of ``--lora-modules``: their load ids are 1, 2, 3, … in that order, for whoever names them.

    Raises:
        ConfigError: one cannot be loaded.
    """
    for load_id, (name, path) in enumerate(config.lora_paths, start=1):
        try:
            size = engine.read_adapter(load_id, name, path)
        except RequestError as error:
            raise ConfigError(f"--lora-modules {name}={path}: {error}") from None
        engine.load_adapter(load_id, path, size)
        report(f"adapter {name}: rank {size.rank}, {size.num_bytes / 2**20:.1f} MiB")


def _predictor(
    config: EngineConfig, model: Model, executor: TorchExecutor, settings: SchedulerConfig
) -> tuple[StepCost, str]:
    """The step cost of the loaded model on this machine, and where it comes from."""
    from foliolm.executor.torch.measured import loaded_account, measure_device, measure_link, measure_steps
    from foliolm.ledger.calibration import calibrate
    from foliolm.ledger.cost_file import load_cost
    from foliolm.ledger.step_cost import step_cost

    held = loaded_account(model)
    link = measure_link(executor, settings.num_host_blocks)
    if config.step_cost is not None:
        cost = load_cost(Path(config.step_cost), held).cost
        return replace(cost, host_link=cost.host_link or link), "file"
    prior = replace(step_cost(held, measure_device(model)), host_link=link)
    samples = measure_steps(
        executor, prior, settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len
    )
    if len(samples) < 10:
        return prior, "default"
    return calibrate(prior, samples, hold_out=False).cost, "startup"


def _machine_limits(model: Model, report: Callable[[str], None]) -> MachineLimits:
    """What the machine can do, for the books; measured before the KV pool takes what memory there is."""
    from foliolm.executor.torch.measured import measure_limits

    found = measure_limits(model)
    report(found.describe())
    return found


def _described_limits(cost: StepCost) -> MachineLimits:
    """The same of a device that is only described."""
    return MachineLimits(cost.bandwidth, cost.flops, cost.model.compute, "as the step cost's device is described")


def _use_threads(config: EngineConfig) -> int:
    """Compute threads: as many as the user says, else as cores that this process may use."""
    import torch

    threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def _load(config: EngineConfig, files: ModelFiles, report: Callable[[str], None]) -> Model:
    import torch

    from foliolm.model.loader import dummy_model, load_model, resolve_dtype
    from foliolm.ops.native.library import choose_kernels

    if config.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    elif config.device in ("cpu", "cuda"):
        device = torch.device(config.device)
    else:
        raise ConfigError(f"--device is {config.device!r}; it must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but this PyTorch finds no CUDA device")
    began = time.perf_counter()
    if device.type == "cpu" and not (config.kernels == "auto" and "float16" in (config.dtype, config.kv_cache_dtype)):
        choice = choose_kernels(config.kernels)
        report(choice.reason)
        if choice.library is not None:
            native = _load_native(config, files, choice.library)
            native.deterministic = config.deterministic
            report(_loaded(files, native, began))
            return native
    elif config.kernels not in ("auto", "torch"):
        raise ConfigError(f"--kernels is {config.kernels!r}; native kernels are for --device cpu")
    if config.deterministic:
        raise ConfigError("--deterministic needs the native kernels; PyTorch's results depend on the batch")
    dtype = resolve_dtype(config.dtype, device)
    _check_plain(config, dtype)
    model: Model
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
    report(_loaded(files, model, began))
    return model


def _load_native(config: EngineConfig, files: ModelFiles, library: Library) -> NativeModel:
    """The model for the native kernels.

    Raises:
        ConfigError: float16, which the kernels do not compute with.
    """
    import torch

    from foliolm.model.native_loader import NativeBuilder, dummy_native

    for flag, value in (("--dtype", config.dtype), ("--kv-cache-dtype", config.kv_cache_dtype)):
        if value == "float16":
            raise ConfigError(f"{flag} is 'float16'; native kernels have float32, bfloat16 and int8 (--kernels torch)")
    as_stored = config.quantization == "auto" and config.dtype == "auto"
    # Weights that are not quantised stay so unless int8 is asked for (what that costs: benchmarks/quality.py).
    weights = "bfloat16" if as_stored and files.shape.weight_dtype == "bfloat16" else "float32"
    if config.quantization == "int8":
        weights = "int8"
    elif config.dtype != "auto":
        weights = config.dtype
    stored = files.shape.weight_dtype
    quantised = weights == "int8" or (as_stored and stored not in ("float32", "float16", "bfloat16"))
    kept = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
    kv = ("int8" if quantised else weights) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    kv_dtype = kept[kv]
    if files.format == "dummy":
        return dummy_native(library, files.shape, weights=weights, kv_dtype=kv_dtype, num_tokens=files.num_tokens)
    with torch.inference_mode():
        builder = NativeBuilder(library, files.shape, weights, kv_dtype, files.num_tokens)
        if as_stored and files.gguf is not None:
            gguf = files.gguf
            for part in builder.parameters:
                builder.add_stored(part.name, gguf.raw(part.name), functools.partial(gguf.floats, part.name))
        else:
            for name, tensor in files.iter_tensors():
                builder.add(name, tensor)
        return builder.build(files.rope_factors)


def _check_plain(config: EngineConfig, dtype: torch.dtype) -> None:
    """PyTorch's operators compute with one type.

    Raises:
        ConfigError: the settings ask for another.
    """
    name = str(dtype).removeprefix("torch.")
    if config.quantization == "int8":
        raise ConfigError("--quantization is 'int8'; it needs native kernels on a CPU (see foliolm doctor)")
    if config.kv_cache_dtype not in ("auto", name):
        raise ConfigError(
            f"--kv-cache-dtype is {config.kv_cache_dtype!r}; without native kernels it is the weights' {name}"
        )


def _loaded(files: ModelFiles, model: Model, began: float) -> str:
    verb = "made up" if files.format == "dummy" else "loaded"
    return (
        f"{verb} {files.name} in {time.perf_counter() - began:.1f} s: weights {model.weights_name}, KV cache "
        f"{str(model.kv_dtype).removeprefix('torch.')}"
    )


def _grammars(files: ModelFiles) -> Grammars:
    """Compiles what answers must follow; the model's tokenizer is read when the first request asks for that."""
    from foliolm.text.grammar import CompiledGrammars, GrammarsOnDemand

    def load() -> CompiledGrammars:
        from foliolm.text.load import load_text

        tokenizer, _ = load_text(files)
        return CompiledGrammars(tokenizer, files.eos_token_ids)

    return GrammarsOnDemand(load)


def _prefill_rate(model: Model, block_size: int) -> float:
    """Tokens a second that the model prefills, measured on a small pool of its own: the real one needs the budget."""
    from foliolm.executor.torch.executor import TorchExecutor

    probe = TorchExecutor(model, num_blocks=-(-RATE_CHUNK // block_size) + 1, block_size=block_size)
    try:
        return probe.measure_prefill_rate(RATE_CHUNK)
    finally:
        probe.close()


def _size_pool(config: EngineConfig, limits: Limits, model: Model, rate: float | None) -> MemorySum:
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
