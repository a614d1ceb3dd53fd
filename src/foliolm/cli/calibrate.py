"""``foliolm calibrate``: fit the step cost to measured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.ledger.calibration import Calibration
    from foliolm.ledger.samples import Sample
    from foliolm.ledger.step_cost import StepCost


def calibrate(
    source: Annotated[Path, typer.Argument(help="A ledger's folder, or a log that vLLM wrote.", metavar="LEDGER|LOG")],
    out: Annotated[Path | None, typer.Option(help="Write the fitted step cost here, for serve --step-cost.")] = None,
    engine: Annotated[int | None, typer.Option(help="Which engine of the ledger; default: the newest.", min=0)] = None,
    model: Annotated[str | None, typer.Option(help="For a vLLM log: a preset, or a model's folder or file.")] = None,
    device: Annotated[str | None, typer.Option(help="For a vLLM log: a device preset, or a device's file.")] = None,
    quantization: Annotated[str | None, typer.Option(help="For a vLLM log: how the weights are stored.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="For a vLLM log: the KV cache's type.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="For a vLLM log: devices that share the model.")] = 1,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="For a vLLM log that does not say it: tokens of the KV cache.", min=1)
    ] = None,
    table: Annotated[
        bool | None,
        typer.Option(
            "--table/--no-table",
            help="Also fit a table of factors by new tokens. Default: for a ledger, not for a log.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Fit the step cost to a ledger's steps, or to those in a vLLM log (--enable-logging-iteration-details).

    Prints the error on every fifth step, which the fit does not see, by kind of step, and which terms the data cannot
    tell apart. Example: foliolm calibrate ./books --out device.json
    """
    from foliolm.ledger.calibration import calibrate as fit
    from foliolm.ledger.cost_file import save_cost

    if source.is_dir():
        cost, samples, gap, http = _from_ledger(source, engine)
    elif source.is_file():
        cost, samples = _from_log(
            source, model, device, quantization, kv_cache_dtype, tensor_parallel_size, kv_cache_tokens
        )
        gap = http = 0.0
    else:
        raise ConfigError(f"{source}: there is no such folder or file")
    found = fit(cost, samples, table=source.is_dir() if table is None else table)
    if out is not None:
        save_cost(out, found.cost, gap, f"{found.num_steps} steps of {source.name}", http)
        typer.echo(f"kept: {out}", err=True)
    if as_json:
        print(json.dumps(_report(found, gap, http), allow_nan=False))
    else:
        _print(found, gap, http)


def _from_ledger(folder: Path, engine: int | None) -> tuple[StepCost, list[Sample], float, float]:
    from foliolm.ledger.explain import http_s
    from foliolm.ledger.gaps import host_gap_s
    from foliolm.ledger.reading import newest_run
    from foliolm.ledger.samples import read_samples

    run = newest_run(folder, engine)
    if run.engine.cost is None:
        raise ConfigError(f"ledger {folder}: it was written without a step cost, so the model's account is not known")
    samples = read_samples(run.engine.cost.model, run.steps)
    return run.engine.cost, samples, host_gap_s(run.steps), http_s(run.requests)


def _from_log(
    path: Path,
    model: str | None,
    device: str | None,
    quantization: str | None,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    kv_cache_tokens: int | None,
) -> tuple[StepCost, list[Sample]]:
    from foliolm.ledger.accounts import account
    from foliolm.ledger.step_cost import step_cost
    from foliolm.ledger.vllm_log import read_vllm_log
    from foliolm.shape.load import load_device, load_model_shape

    if model is None or device is None:
        raise ConfigError("a vLLM log names neither model nor device: give --model and --device")
    held = account(load_model_shape(model), quantization, kv_cache_dtype, tensor_parallel_size)
    log = read_vllm_log(path.read_text(errors="replace").splitlines(), held, kv_cache_tokens)
    if log.num_without_usage:
        typer.echo(f"{log.num_without_usage} iterations before the first KV cache usage are left out", err=True)
    return step_cost(held, load_device(device)), log.samples


def _report(found: Calibration, gap: float, http: float) -> dict[str, Any]:
    from foliolm.ledger.calibration import coefficient_table

    return {
        "steps": found.num_steps,
        "model": found.cost.model.name,
        "coefficients": coefficient_table(found.cost),
        "linear_knots": [list(knot) for knot in found.cost.linear_knots],
        "host_gap_s": gap,
        "http_s": http,
        "held_out": {
            kind: {"steps": e.count, "median_ape": e.median, "p90_ape": e.p90, "total_error": e.total}
            for kind, e in found.errors.items()
        },
        "cannot_tell_apart": [list(pair) for pair in found.alike],
        "not_seen": list(found.unseen),
    }


def _print(found: Calibration, gap: float, http: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from foliolm.ledger.calibration import coefficient_table

    console = Console()
    table = Table(title=f"{found.cost.model.name}: fitted to {found.num_steps} steps", title_justify="left")
    table.add_column("term")
    table.add_column("fitted", justify="right")
    for name, value in coefficient_table(found.cost).items():
        shown = f"{value * 1e6:.4g} µs" if name.endswith("_s") else f"{value:.4g}"
        table.add_row(name, shown + ("  (not seen: as before)" if name in found.unseen else ""))
    console.print(table)
    if found.cost.linear_knots:
        at = ", ".join(f"{tokens:.0f}: {factor:.2f}" for tokens, factor in found.cost.linear_knots)
        console.print(f"factors of the linears by new tokens: {at}")
    errors = Table(title="on steps that the fit did not see", title_justify="left")
    for name in ("steps of kind", "count", "median error", "90% below", "total"):
        errors.add_column(name, justify="left" if name == "steps of kind" else "right")
    for kind, e in found.errors.items():
        errors.add_row(kind, str(e.count), f"{e.median:.1%}", f"{e.p90:.1%}", f"{e.total:+.1%}")
    console.print(errors)
    for one, other in found.alike:
        console.print(f"the data cannot tell {one} and {other} apart: their sum is known, their shares are not")
    if gap:
        console.print(f"the host takes {gap * 1e6:.0f} µs between two steps")
    if http:
        console.print(f"a request reaches the engine's queue {http * 1e3:.2f} ms after it was accepted")
