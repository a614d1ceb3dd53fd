"""The compiled kernels of this process."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

from foliolm.core.config import KERNELS
from foliolm.core.errors import ConfigError
from foliolm.ops.native import abi
from foliolm.ops.native.build import BuildError, built_library
from foliolm.ops.native.target import best_target, cpu_features, target_named


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library.

    Attributes:
        name: of its target.
        path: where it lies.
        calls: its functions.
    """

    name: str
    path: Path
    calls: ctypes.CDLL

    def check(self, result: int) -> None:
        """Raise what a call reported.

        Raises:
            RuntimeError: the call failed.
        """
        if result:
            raise RuntimeError(f"native kernels: {self.calls.folio_error().decode()}")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernels run on the CPU.

    Attributes:
        library: the native ones; None: PyTorch's operators.
        reason: a sentence.
    """

    library: Library | None
    reason: str


def choose_kernels(wanted: str = "auto") -> Choice:
    """The kernels that a setting means on this machine; compiles them if need be.

    Args:
        wanted: ``auto`` (native where they compile), ``torch``, ``native``, or a target's name.

    Raises:
        ConfigError: what is wanted cannot be had here.
    """
    if wanted not in KERNELS:
        raise ConfigError(f"--kernels is {wanted!r}; it must be one of {', '.join(KERNELS)}")
    if wanted == "torch":
        return Choice(None, "PyTorch's operators: --kernels torch")
    features = cpu_features()
    target = best_target(features) if wanted in ("auto", "native") else target_named(wanted)
    if not target.needs <= features:
        lacking = ", ".join(sorted(target.needs - features))
        raise ConfigError(f"--kernels is {wanted!r}; this CPU lacks {lacking}")
    try:
        library = load_library(target.name)
    except BuildError as error:
        if wanted != "auto":
            raise ConfigError(f"--kernels is {wanted!r}, but the kernels cannot be built: {error}") from None
        return Choice(None, f"PyTorch's operators: native kernels cannot be built ({error})")
    why = "the best that this CPU has" if wanted in ("auto", "native") else f"--kernels {wanted}"
    return Choice(library, f"native {target.name} kernels: {why}")


@functools.cache
def load_library(target_name: str) -> Library:
    """The library of a target, compiled if need be.

    Raises:
        BuildError: it cannot be compiled or loaded.
    """
    path = built_library(target_named(target_name))
    return open_library(target_name, path)


def open_library(name: str, path: Path) -> Library:
    """Load a compiled library.

    Raises:
        BuildError: the system cannot load it, or it is of another version than this binding.
    """
    try:
        calls = ctypes.CDLL(str(path))
        abi.declare(calls)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    sizes = (ctypes.c_int64 * len(abi.SIZES))()
    calls.folio_sizes(sizes)
    if tuple(sizes) != abi.SIZES:
        raise BuildError(f"{path}: structures of {tuple(sizes)} bytes, the binding has {abi.SIZES}")
    return Library(name, path, calls)
