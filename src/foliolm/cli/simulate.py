"""``foliolm simulate``: a workload through the engine's own scheduler in virtual time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.cli import simulate_prefix
from foliolm.cli.flags import with_flags
from foliolm.cli.oneline import OneLineCommand, OneLineGroup
from foliolm.cli.planning.options import KVCacheDtype, MaybeDevice, MaybeModel, Quantization, TensorParallel
from foliolm.cli.simulating.setup import ADAPTER_FLAGS, ENGINE_FLAGS, WORKLOAD_FLAGS, describe
from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.adapters import AdapterOptions, WithAdapters
from foliolm.simulate.workload.options import WorkloadOptions

if TYPE_CHECKING:
    from foliolm.simulate.outcome import Machine, Outcome


def _simulate(
    context: typer.Context,
    settings: dict[str, Any],
    workload: dict[str, Any],
    adapters: dict[str, Any],
    model: MaybeModel = None,
    device: MaybeDevice = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    other_gib: Annotated[
        float | None, typer.Option(help="GiB of the device for driver context, graphs and buffers [1].")
    ] = None,
    cost: Annotated[Path | None, typer.Option(help="A step cost that foliolm calibrate wrote.")] = None,
    kernels: Annotated[
        Path | None, typer.Option(help="Folder of measured kernel times: DEVICE/MODEL/VARIANT/tpN/*.csv.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Says everything that is drawn.")] = 0,
    like: Annotated[
        str | None, typer.Option(help="Scheduler options as documented for vllm, sglang or tgi; given flags beat them.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="One workload under ways of batching: some of static,prefill-first,mixed,chunked."),
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Write the engine's books here, for foliolm explain.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run (.png or .svg).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report of one self-contained file.")] = None,
    leap: Annotated[
        bool,
        typer.Option("--leap/--no-leap", help="Take runs of like decode steps at once; the numbers are the same."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Play a workload through the engine's own scheduler and KV manager in virtual time: no weights, no GPU.

    Times are seconds. Ctrl-C ends the run and prints what is done.
    Example: foliolm simulate --model qwen3-8b --device h100-sxm --rate 8 --input-len lognormal:1000:1 --output-len 200
    """
    if context.invoked_subcommand is not None:
        return
    from foliolm.cli.simulating.modes import like_engine, modes_of
    from foliolm.cli.simulating.pictures import check_kind

    check_kind(plot)
    described = describe(
        model, device, quantization, kv_cache_dtype, tensor_parallel_size, other_gib, cost, kernels, ledger
    )
    described = replace(described, adapters=AdapterOptions(**adapters))
    if kernels is not None and described.adapters.weights():
        raise ConfigError("--kernels holds no times of adapters; leave it or --lora-adapters and --lora-shares out")
    options = WorkloadOptions(**workload)
    chosen, said = like_engine(like, settings)
    for line in said:
        _say(line)
    if compare is not None:
        from foliolm.cli.simulating.compare import run_comparison

        if ledger is not None or html is not None:
            raise ConfigError("--compare runs several engines; it takes --plot, not --ledger or --html")
        run_comparison(described, options, modes_of(compare, chosen), seed, leap, plot, as_json)
        return
    machine, reasons = described.machine(chosen)
    for line in reasons:
        _say(line)
    outcome, wall_s = run_one(machine, options, seed, leap, described.adapters)
    numbers = outcome.to_json(wall_s)
    if outcome.collector.first_refusal:
        _say(f"{outcome.collector.num_refused} refused; the first: {outcome.collector.first_refusal}")
    if plot is not None or html is not None:
        from foliolm.cli.simulating.pictures import write_pictures

        write_pictures(outcome, numbers, described, plot, html)
    if as_json:
        print(json.dumps(numbers, allow_nan=False))
        return
    from foliolm.cli.simulating.text import print_outcome

    print_outcome(numbers, described.setting.shape.name, described.setting.need_device().id)


def run_one(
    machine: Machine,
    options: WorkloadOptions,
    seed: int,
    leap: bool = True,
    adapters: AdapterOptions | None = None,
) -> tuple[Outcome, float]:
    """Play a workload with a progress bar; the outcome and the wall time that it took."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from foliolm.simulate.outcome import play

    workload = options.build(seed, machine.settings.max_model_len)
    if adapters is not None and (weights := adapters.weights()):
        workload = WithAdapters(workload, weights, seed)
    columns = TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=workload.total)
        shown = [0.0]

        def show(done: int) -> None:
            if done % 256 == 0 and time.monotonic() - shown[0] > 0.1:
                shown[0] = time.monotonic()
                bar.update(task, completed=done)

        began = time.perf_counter()
        outcome = play(machine, workload, show, leap)
        wall_s = time.perf_counter() - began
    if outcome.interrupted:
        _say(f"interrupted after {outcome.collector.num_ended} requests; the numbers are of those")
    return outcome, wall_s


def _say(line: str) -> None:
    print(line, file=sys.stderr)


simulate = with_flags(_simulate, (WORKLOAD_FLAGS, ADAPTER_FLAGS, ENGINE_FLAGS))
simulate.__name__ = "simulate"
app = typer.Typer(
    name="simulate", cls=OneLineGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
app.callback(invoke_without_command=True)(simulate)
app.command("prefix", cls=OneLineCommand, epilog=simulate_prefix.EXAMPLE)(simulate_prefix.prefix)
