"""Measure a CPU or a CUDA device with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from foliolm.cli.probing.machine import MATMUL_SECONDS, MATMUL_SIDE, cpu_name, memory_bytes, num_threads
from foliolm.core.errors import ConfigError
from foliolm.shape.device import Device


def measure(num_bytes: int, repeats: int, device: str) -> Device:
    """Measure ``device`` (``auto``, ``cpu`` or ``cuda``), best of ``repeats``.

    Raises:
        ConfigError: there is no CUDA device, or the memory does not hold what is to be read.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device")
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    place = torch.device("cuda" if use_cuda else "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads())
    try:
        bandwidth, link = _memory_rates(place, num_bytes, repeats)
        rates = {name: _matmul_rate(place, dtype, repeats) for name, dtype in _dtypes(place).items()}
    except (RuntimeError, MemoryError) as error:
        first = str(error).splitlines()[0] if str(error) else "out of memory"
        raise ConfigError(f"size_gib is {num_bytes / 2**30:g}; measuring failed: {first}") from None
    finally:
        torch.set_num_threads(before)
    return _describe(place, bandwidth, link, rates, repeats)


def _dtypes(place: torch.device) -> dict[str, torch.dtype]:
    dtypes = {"fp32_tflops": torch.float32, "bf16_tflops_dense": torch.bfloat16}
    if place.type == "cuda":
        dtypes["fp16_tflops_dense"] = torch.float16
    return dtypes


def _memory_rates(place: torch.device, num_bytes: int, repeats: int) -> tuple[float, float]:
    """Bytes a second of reading, and of copying to the host (on a CPU: within its memory)."""
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=place)
    read = _best(place, repeats, lambda: data.sum())
    part = data[: len(data) // 4]
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=place.type == "cuda")
    copy = _best(place, repeats, lambda: host.copy_(part, non_blocking=True))
    return data.numel() * 4 / read, part.numel() * 4 / copy


def _matmul_rate(place: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Operations a second of square matrix products, as large as the device multiplies in a fraction of a second.

    A number type that the device has no arithmetic for may be a thousand times slower than another, so the side grows
    from a small one.
    """
    side, once, a = MATMUL_SIDE // 4, 0.0, torch.ones(1, 1)
    while once < MATMUL_SECONDS / 8 and side < (16 if place.type == "cuda" else 2) * MATMUL_SIDE:
        side *= 2
        a = torch.ones(side, side, device=place).to(dtype)
        once = _best(place, 1, lambda a=a: torch.mm(a, a))  # type: ignore[misc]
    runs = max(1, int(MATMUL_SECONDS / once))

    def many() -> None:
        for _ in range(runs):
            torch.mm(a, a)

    return 2.0 * side**3 * runs / _best(place, repeats, many)


def _best(place: torch.device, repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of ``repeats`` runs, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        _wait(place)
        start = time.perf_counter()
        work()
        _wait(place)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize()


def _describe(place: torch.device, bandwidth: float, link: float, rates: dict[str, float], repeats: int) -> Device:
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
        sm: int | None = 10 * properties.major + properties.minor
        note = "measured copy to pinned host memory"
    else:
        name, memory, sm = f"{cpu_name()}, {num_threads()} threads", memory_bytes(), None
        note = "measured copy within host memory"
    return Device(
        id="this-machine",
        name=name,
        kind="gpu" if place.type == "cuda" else "cpu",
        memory_gb=memory / 2**30,
        memory_reported_mib=memory / 2**20,
        bandwidth_gbps=bandwidth / 1e9,
        host_link_gbps_one_way=link / 1e9,
        host_link_note=note,
        sm=sm,
        confidence="measured",
        source=f"foliolm probe with torch {torch.__version__}, best of {repeats}",
        **{key: rate / 1e12 for key, rate in rates.items()},
    )
