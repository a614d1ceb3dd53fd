"""``foliolm probe``: measure this machine and keep the result for the planner and the server."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from foliolm.cli.oneline import OneLineCommand
from foliolm.core.errors import ConfigError
from foliolm.plan.checks import real
from foliolm.shape.device import Device
from foliolm.shape.probed import save_probed


def probe(
    size_gib: Annotated[float, typer.Option(help="GiB that each bandwidth run reads, at least 1.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Runs of each measurement; the best counts.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. auto: cuda where there is one.")] = "auto",
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep it as the device this-machine.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout instead of a table.")] = False,
) -> None:
    """Measure read bandwidth, matmul rates by number type and the host copy, and keep them as ``this-machine``.

    Bandwidth is the best of --repeats sums over --size-gib of memory on all threads. With --save (the default) the
    result goes to device.json under FOLIOLM_HOME, else ~/.cache/foliolm. Example: foliolm probe --json
    """
    real("size_gib", size_gib, 1.0, 1024.0)
    if not 1 <= repeats <= 100:
        raise ConfigError(f"repeats is {repeats}; it must be from 1 to 100")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; it must be auto, cpu or cuda")
    measured = _measure(int(size_gib * 2**30), repeats, device)
    if save:
        typer.echo(f"kept: {save_probed(measured)}", err=True)
    if as_json:
        print(json.dumps(measured.to_dict(), allow_nan=False))
        return
    _print_table(measured)


def _measure(num_bytes: int, repeats: int, device: str) -> Device:
    import importlib.util

    if importlib.util.find_spec("torch") is not None:
        from foliolm.cli.probing.with_torch import measure

        return measure(num_bytes, repeats, device)
    if device == "cuda":
        raise ConfigError("device is cuda, but torch is not installed; install it with: pip install 'foliolm[serve]'")
    from foliolm.cli.probing.with_numpy import measure as measure_with_numpy

    return measure_with_numpy(num_bytes, repeats)


def _print_table(measured: Device) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=measured.name, title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("measured", justify="right")
    lines = [
        ("memory", f"{measured.memory_bytes / 2**30:.4g} GiB"),
        ("read bandwidth", f"{measured.bandwidth_gbps:.4g} GB/s"),
        ("host copy, one way", _rate(measured.host_link_gbps_one_way, "GB/s")),
        ("matmul float32", _rate(measured.fp32_tflops, "TFLOP/s")),
        ("matmul bfloat16", _rate(measured.bf16_tflops_dense, "TFLOP/s")),
        ("matmul float16", _rate(measured.fp16_tflops_dense, "TFLOP/s")),
        ("matmul int8", _rate(measured.int8_tops_dense, "TOP/s")),
        ("matmul fp8", _rate(measured.fp8_tflops_dense, "TFLOP/s")),
    ]
    for name, value in lines:
        table.add_row(name, value)
    Console().print(table)


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4g} {unit}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=OneLineCommand)(probe)
    app()
