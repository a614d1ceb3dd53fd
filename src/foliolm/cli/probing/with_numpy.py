"""Measure a CPU where PyTorch is not installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from foliolm.cli.probing.machine import MATMUL_SECONDS, MATMUL_SIDE, cpu_name, memory_bytes, num_threads
from foliolm.core.errors import ConfigError
from foliolm.shape.device import Device


def measure(num_bytes: int, repeats: int) -> Device:
    """Measure this machine's CPU, best of ``repeats``.

    Raises:
        ConfigError: the memory does not hold what is to be read.
    """
    threads = num_threads()
    try:
        data = np.ones(num_bytes // 8, dtype=np.float64)
        target = np.empty(len(data) // 4, dtype=np.float64)
    except MemoryError:
        raise ConfigError(f"size_gib is {num_bytes / 2**30:g}; there is not that much memory") from None
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:  # NumPy leaves the interpreter lock while it sums
        read = _best(repeats, lambda: list(pool.map(np.sum, parts)))
    copy = _best(repeats, lambda: np.copyto(target, data[: len(target)]))
    side = MATMUL_SIDE
    a = np.ones((side, side), dtype=np.float32)
    runs = max(1, int(MATMUL_SECONDS / _best(1, lambda: a @ a)))
    rate = 2.0 * side**3 * runs / _best(repeats, lambda: [a @ a for _ in range(runs)])
    memory = memory_bytes()
    return Device(
        id="this-machine",
        name=f"{cpu_name()}, {threads} threads",
        kind="cpu",
        memory_gb=memory / 2**30,
        memory_reported_mib=memory / 2**20,
        bandwidth_gbps=data.nbytes / read / 1e9,
        host_link_gbps_one_way=target.nbytes / copy / 1e9,
        host_link_note="measured copy within host memory",
        fp32_tflops=rate / 1e12,
        confidence="measured",
        source=f"foliolm probe with numpy {np.__version__}, best of {repeats}",
    )


def _best(repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of ``repeats`` runs, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
