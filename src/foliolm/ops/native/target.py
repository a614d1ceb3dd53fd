"""Which instruction sets the kernels are written for, and which of them this CPU has."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """A way of compiling the kernels.

    Attributes:
        name: as the library itself says it.
        flags: of GCC and Clang.
        needs: the CPU's features, as Linux names them; empty: any CPU.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
TARGETS = (
    Target(
        "avx512-vnni",
        ("-march=x86-64-v4", "-mavx512vnni"),
        _V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni"},
    ),
    Target("avx2", ("-march=x86-64-v3",), _V3),
    Target("portable", ("-DFOLIO_PORTABLE",), frozenset()),
)
"""Best first. Their packed weights are alike; what differs is how wide and with which products they compute."""


def cpu_features(read: Callable[[], str] = lambda: Path("/proc/cpuinfo").read_text()) -> frozenset[str]:
    """The features of an x86-64 CPU as Linux lists them; none on another CPU or system."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = read().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def best_target(features: frozenset[str]) -> Target:
    """The first that this CPU can run."""
    return next(target for target in TARGETS if target.needs <= features)


def target_named(name: str) -> Target:
    """A target by name.

    Raises:
        KeyError: there is none of that name.
    """
    return {target.name: target for target in TARGETS}[name]
