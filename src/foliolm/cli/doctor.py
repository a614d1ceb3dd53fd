"""``foliolm doctor``: which kernels run here, and why."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import typer


def doctor(
    kernels: Annotated[
        str, typer.Option(help="As for serve: auto, native, avx512-vnni, avx2, portable or torch.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout instead of lines.")] = False,
) -> None:
    """Say which CPU kernels run on this machine and why; compiles them if that has not been done.

    The first build takes seconds to a minute and is kept under FOLIOLM_HOME, else ~/.cache/foliolm. With a library the
    read bandwidth of its threads is measured over 256 MiB. Example: foliolm doctor --json
    """
    found = examine(kernels)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    for name, value in found.items():
        if value is not None:
            typer.echo(f"{name.replace('_', ' ')}: {value}")


def examine(kernels: str) -> dict[str, Any]:
    """What there is to say.

    Raises:
        ConfigError: the kernels asked for cannot be had here.
    """
    from foliolm.ops.native.build import BuildError, find_compiler
    from foliolm.ops.native.library import choose_kernels
    from foliolm.ops.native.target import TARGETS, cpu_features

    features = cpu_features()
    try:
        compiler: str | None = find_compiler()
    except BuildError:
        compiler = None
    choice = choose_kernels(kernels)
    library = choice.library
    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "runnable": ", ".join(target.name for target in TARGETS if target.needs <= features),
        "compiler": compiler,
        "kernels": "torch" if library is None else library.name,
        "reason": choice.reason,
        "library": None if library is None else str(library.path),
        "read_gb_per_s": None if library is None else round(_read_rate(library), 1),
    }


def _read_rate(library: Any) -> float:
    import numpy as np

    data = np.ones(256 << 20, np.uint8)
    threads = len(os.sched_getaffinity(0))
    best: float = max(library.calls.folio_read_rate(data.ctypes.data, data.nbytes, threads) for _ in range(4))
    return best / 1e9
