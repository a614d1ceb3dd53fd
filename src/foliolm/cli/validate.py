"""``foliolm validate``: measured runs replayed by the engine's own scheduler, and the errors."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.shape.model import ModelShape
    from foliolm.simulate.measured_run import MeasuredRun
    from foliolm.simulate.validate import Fitted, Replay


def validate(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders with meta.json and requests.jsonl.", metavar="RUN_DIR...")
    ],
    kernels: Annotated[
        Path | None, typer.Option(help="Folder of measured kernel times: GPU/MODEL/VARIANT/tpN/*.csv.")
    ] = None,
    cost: Annotated[Path | None, typer.Option(help="A step cost that foliolm calibrate wrote.")] = None,
    calibrate_first: Annotated[
        float | None,
        typer.Option(help="Fit the host's times to this share of a run's first requests; errors are of the rest."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The GPU, where the folder around the runs does not name a preset.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Replay measured runs in virtual time and say how far off times to first token, per token and whole are.

    An error is (simulated − measured) / measured. Times are seconds from a request's arrival.
    Example: foliolm validate runs/RTXPRO6000/Llama-3.1-8B --kernels kernel_profiles --calibrate-first 0.2
    """
    from foliolm.simulate.measured_run import read_measured_run
    from foliolm.simulate.validate import calibrate_first as fit
    from foliolm.simulate.validate import compare, first_labels, replay

    if calibrate_first is not None and kernels is None:
        raise ConfigError("--calibrate-first fits what kernel tables lack; give --kernels")
    results = []
    for path in runs:
        began = time.perf_counter()
        run = read_measured_run(path)
        plan, said = plan_of(run, kernels, cost, device)
        for line in said:
            print(f"{run.name}: {line}", file=sys.stderr)
        fitted, left_out = None, frozenset[str]()
        if calibrate_first is not None:
            with _spinner(f"{run.name}: fitting to the first {calibrate_first:.0%}") as tick:
                fitted = fit(plan, calibrate_first, tick)
            left_out = frozenset(first_labels(run, calibrate_first))
        labels = [item.label for item in run.items if item.label not in left_out]
        again = replay(plan, fitted)
        errors = compare(run, again.times, labels)
        result: dict[str, Any] = {"name": run.name, **errors, "requests": len(labels)}
        result["wall_s"] = time.perf_counter() - began
        result["kernels"] = None if plan.tables is None else str(plan.tables.folder)
        result["kv_blocks"] = plan.settings.num_blocks - 1
        result["kv_peak"] = again.kv_peak
        result["preemptions"], result["recomputed_tokens"] = again.preemptions, again.recomputed_tokens
        result["prefix_hit_ratio"] = again.prefix_hit_ratio
        result["fitted"] = None if fitted is None else _of(fitted)
        result["explained"] = explained(plan, fitted)
        results.append(result)
        if not as_json:
            _print(result)
    if as_json:
        print(json.dumps({"runs": results}, allow_nan=False))


def plan_of(
    run: MeasuredRun, kernels: Path | None, cost_file: Path | None, device: str | None
) -> tuple[Replay, tuple[str, ...]]:
    """How a run is replayed, and what was taken for granted.

    Raises:
        ConfigError: model, device or profile is unknown, or the run cannot be served with what is there.
    """
    from foliolm.ledger.cost_file import load_cost
    from foliolm.plan.setting import MemoryOptions, Setting, memory_of
    from foliolm.shape.load import load_device
    from foliolm.simulate.measured_run import VLLM_SEQS, VLLM_TOKENS
    from foliolm.simulate.profiles import device_of_folder, find_profile
    from foliolm.simulate.validate import Replay, vllm_settings

    said = []
    found = device or device_of_folder(run.gpu)
    if found is None:
        raise ConfigError(f"{run.path}: the folder {run.gpu!r} names no device that is known; give --device")
    shape, known_as = _shape(run.model)
    if known_as != run.model:
        said.append(f"{run.model} has the shape of {known_as}")
    tp, dp = run.whole("tensor_parallel_size", 1), run.whole("data_parallel_size", 1)
    kv_dtype = str(run.engine.get("kv_cache_dtype") or "auto")
    setting = Setting(
        shape, load_device(found), run.engine.get("quantization"), kv_dtype, tp, block_size=run.block_size
    )
    cost = setting.cost if cost_file is None else load_cost(cost_file, setting.account).cost
    tables = None
    if kernels is not None:
        tables = find_profile(kernels, found, replace(shape, name=run.model), tp)
    experts = dp if run.engine.get("enable_expert_parallel") and shape.moe is not None else 1
    num_blocks = (run.kv_blocks or 0) + 1
    if run.kv_blocks is None:
        memory = memory_of(
            setting,
            MemoryOptions(
                float(run.engine.get("gpu_memory_utilization") or 0.9),
                run.whole("max_num_batched_tokens", VLLM_TOKENS),
                run.whole("max_num_seqs", VLLM_SEQS),
            ),
        )
        num_blocks = memory.kv_pool // (run.block_size * setting.account.kv_bytes_per_token)
        if num_blocks < 2:
            raise ConfigError(f"{run.path}: no KV fits {found} beside {memory.weights / 2**30:.1f} GiB of weights")
        said.append(f"the run recorded no block count; by the memory sum it is {num_blocks - 1}")
    if dp > 1:
        said.append(f"{dp} data-parallel engines are simulated apart" + (", experts shared" if experts > 1 else ""))
    longest = max(item.num_prompt + item.num_output for item in run.items)
    most = run.whole("max_model_len", shape.max_position_embeddings)
    most = max(longest + 1, min(most, (num_blocks - 1) * run.block_size))
    return Replay(run, shape, vllm_settings(run, num_blocks, most), cost, tables, dp, experts), tuple(said)


def _shape(name: str) -> tuple[ModelShape, str]:
    """The preset of a model's name, or of a longer name's beginning: a release of the same shape."""
    from foliolm.shape.load import load_model_shape

    words = name.split("-")
    for count in range(len(words), 0, -1):
        try:
            shape = load_model_shape("-".join(words[:count]))
        except ConfigError:
            continue
        return shape, name if count == len(words) else shape.name
    raise ConfigError(f"model {name!r} is no preset, and no preset's name is its beginning")


def explained(plan: Replay, fitted: Fitted | None) -> str:
    """What the errors are made of."""
    if plan.tables is None:
        return (
            "Step times are predicted from peaks and efficiencies: expect them within about a third of the truth. "
            "Measured kernels (--kernels) or a calibrated cost (--cost) do better."
        )
    if fitted is None:
        return (
            "Kernel times alone: what the host takes between kernels and between steps, and a server's cold start, are "
            "in no table, so that every step is too short by it; where requests queue, the times to first token add "
            "that up over all steps before them. --calibrate-first fits it to the run's beginning."
        )
    host = fitted.host
    links = ""
    if plan.cost.model.tensor_parallel_size > 1:
        links = f", an all-reduce starts in {host.collective_s * 1e6:.1f} µs and sends {host.link / 1e9:.1f} GB/s"
    return (
        f"Fitted to the first {fitted.requests} requests: host {host.step_s * 1e3:.3f} ms a step and "
        f"{host.sequence_s * 1e6:.2f} µs a sequence{links}; cold start {fitted.cold_s * 1e3:.2f} ms in each of their "
        f"steps with prompts. Their errors (root mean square) fell from {fitted.error_before:.1%} to "
        f"{fitted.error_after:.1%}."
    )


def _of(fitted: Fitted) -> dict[str, float]:
    host = fitted.host
    return {
        "requests": fitted.requests,
        "host_step_s": host.step_s,
        "host_sequence_s": host.sequence_s,
        "all_reduce_bytes_per_s": host.link,
        "all_reduce_start_s": host.collective_s,
        "cold_start_s": fitted.cold_s,
        "error_before": fitted.error_before,
        "error_after": fitted.error_after,
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from foliolm.cli.simulating.text import seconds
    from foliolm.simulate.validate import METRICS, STATISTICS

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    title = f"{result['name']}: {result['requests']} requests, {result['wall_s']:.1f} s"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("", "measured", "simulated", "difference"):
        table.add_column(name, justify="left" if not name else "right")
    for metric in METRICS:
        for name in STATISTICS:
            values = result[metric]
            table.add_row(
                f"{metric} {name}",
                seconds(values["measured"][name]),
                seconds(values["simulated"][name]),
                f"{values[f'{name}_error']:+.1%}",
                end_section=name == STATISTICS[-1],
            )
    console.print(table)
    console.print(
        f"{result['kv_blocks']:,} KV blocks, at most {result['kv_peak']:.0%} of them in use; {result['preemptions']:,} "
        f"preemptions, {result['recomputed_tokens']:,} tokens computed again; "
        f"{result['prefix_hit_ratio']:.1%} of prompt tokens found in the prefix cache.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(result["explained"], highlight=False, markup=False, soft_wrap=True)


class _spinner:  # noqa: N801
    """Shows that work goes on, on stderr; gives a function to call at each trial."""

    def __init__(self, text: str) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn

        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
        )
        self._text, self._count = text, 0

    def __enter__(self) -> Any:
        self._bar.start()
        self._task = self._bar.add_task(self._text, total=None)

        def tick() -> None:
            self._count += 1
            self._bar.update(self._task, description=f"{self._text}, trial {self._count}")

        return tick

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
