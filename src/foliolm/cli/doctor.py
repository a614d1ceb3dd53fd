"""``foliolm doctor``: which kernels run here, and why."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from foliolm.ops.native.library import Library


def doctor(
    kernels: Annotated[
        str, typer.Option(help="As for serve: auto, native, avx512-vnni, avx2, portable or torch.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout instead of lines.")] = False,
) -> None:
    """Say which CPU kernels run on this machine and why; compiles them if that has not been done.

    The first build takes seconds to a minute and is kept under FOLIOLM_HOME, else ~/.cache/foliolm. With a library its
    threads' read bandwidth is measured over 256 MiB (GB/s), and their products by format of the weights (GFLOP/s: 1e9
    operations a second, a multiplication and an addition counted as two). Example: foliolm doctor --json
    """
    found = examine(kernels)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    for name, value in found.items():
        if value is not None:
            shown = ", ".join(f"{key} {rate}" for key, rate in value.items()) if isinstance(value, dict) else value
            typer.echo(f"{name.replace('_', ' ')}: {shown}")


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
        "product_gflop_per_s": None if library is None else _product_rates(library),
    }


def _read_rate(library: Library) -> float:
    from foliolm.ops.native.rates import read_rate

    return read_rate(library, len(os.sched_getaffinity(0)), 256 << 20) / 1e9


def _product_rates(library: Library) -> dict[str, float]:
    from foliolm.ops.native.abi import Format
    from foliolm.ops.native.rates import product_rate

    threads = len(os.sched_getaffinity(0))
    return {form.name.lower(): round(product_rate(library, form, threads) / 1e9, 1) for form in Format}
