"""``foliolm calibrate``: fit the step cost to measured steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.ledger.calibration import Calibration
    from foliolm.ledger.samples import Sample
    from foliolm.ledger.step_cost import StepCost


def calibrate(
    sources: Annotated[
        list[Path],
        typer.Argument(help="A ledger's folder, or several of one model; or a log of vLLM's.", metavar="LEDGER...|LOG"),
    ],
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

    Several ledgers, written at different times, even out what a machine does differently from minute to minute. Prints
    the error on every fifth step, which the fit does not see, by kind of step, which terms the data cannot tell apart,
    and by how much steps in all took longer than typical ones. Example: foliolm calibrate ./books --out device.json
    """
    from foliolm.ledger.calibration import calibrate as fit
    from foliolm.ledger.cost_file import FORMAT, CostFile, save_cost

    missing = [source for source in sources if not source.exists()]
    if missing:
        raise ConfigError(f"{missing[0]}: there is no such folder or file")
    host = _Host()
    logs = [source for source in sources if source.is_file()]
    if not logs:
        cost, samples, host = _from_ledgers(sources, engine)
    elif len(sources) == 1:
        cost, samples = _from_log(
            logs[0], model, device, quantization, kv_cache_dtype, tensor_parallel_size, kv_cache_tokens
        )
    else:
        raise ConfigError(f"{logs[0]} is a file among several sources; only ledgers' folders can be taken together")
    found = fit(cost, samples, table=not logs if table is None else table)
    if out is not None:
        fitted_from = f"{found.num_steps} steps of {', '.join(source.name for source in sources)}"
        times = host.gap_s, found.cost, host.http_s, host.delivery_s, found.slowdown
        save_cost(out, CostFile(FORMAT, fitted_from, *times))
        typer.echo(f"kept: {out}", err=True)
    if as_json:
        print(json.dumps(_report(found, host), allow_nan=False))
    else:
        _print(found, host)


@dataclass(frozen=True, slots=True)
class _Host:
    """Seconds that are not in steps; see ``CostFile``."""

    gap_s: float = 0.0
    http_s: float = 0.0
    delivery_s: float = 0.0


def _from_ledgers(folders: Sequence[Path], engine: int | None) -> tuple[StepCost, list[Sample], _Host]:
    """The first one's step cost, the steps of all, and the host's times, which weigh as many steps as a ledger has."""
    from foliolm.ledger.explain import delivery_s, http_s
    from foliolm.ledger.gaps import host_gap_s
    from foliolm.ledger.reading import newest_run
    from foliolm.ledger.samples import read_samples

    cost: StepCost | None = None
    samples: list[Sample] = []
    hosts: list[tuple[int, _Host]] = []
    for folder in folders:
        run = newest_run(folder, engine)
        if run.engine.cost is None:
            raise ConfigError(
                f"ledger {folder}: it was written without a step cost, so the model's account is not known"
            )
        cost = cost or run.engine.cost
        if run.engine.cost.model != cost.model:
            raise ConfigError(f"ledger {folder} is of another model or number type than {folders[0]}")
        samples += read_samples(cost.model, run.steps)
        hosts.append((len(run.steps), _Host(host_gap_s(run.steps), http_s(run.requests), delivery_s(run))))
    assert cost is not None
    steps = sum(count for count, _ in hosts)
    means = (sum(count * getattr(host, each.name) for count, host in hosts) / steps for each in fields(_Host))
    return cost, samples, _Host(*means)


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


def _report(found: Calibration, host: _Host) -> dict[str, Any]:
    from foliolm.ledger.calibration import coefficient_table

    return {
        "steps": found.num_steps,
        "model": found.cost.model.name,
        "coefficients": coefficient_table(found.cost),
        "linear_knots": [list(knot) for knot in found.cost.linear_knots],
        "host_gap_s": host.gap_s,
        "http_s": host.http_s,
        "delivery_s": host.delivery_s,
        "slowdown": {"decode": found.slowdown.decode, "prompt": found.slowdown.prompt},
        "held_out": {
            kind: {"steps": e.count, "median_ape": e.median, "p90_ape": e.p90, "total_error": e.total}
            for kind, e in found.errors.items()
        },
        "cannot_tell_apart": [list(pair) for pair in found.alike],
        "not_seen": list(found.unseen),
    }


def _print(found: Calibration, host: _Host) -> None:
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
    slowdown = found.slowdown
    console.print(
        f"all steps together took {slowdown.decode - 1:+.1%} (decodes alone) and {slowdown.prompt - 1:+.1%} (with "
        "prompts) against typical ones"
    )
    if host.gap_s:
        console.print(f"the host takes {host.gap_s * 1e6:.0f} µs between two steps")
    if host.http_s:
        console.print(f"a request reaches the engine's queue {host.http_s * 1e3:.2f} ms after it was accepted")
    if host.delivery_s:
        console.print(f"a token is handed to the socket {host.delivery_s * 1e3:.2f} ms after its step")
