"""One workload under several ways of batching, side by side: who gains, and who pays for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foliolm.cli.simulating.pictures import COLORS, finish, pyplot, save, shares
from foliolm.cli.simulating.text import seconds

if TYPE_CHECKING:
    from foliolm.cli.simulating.setup import Described
    from foliolm.simulate.outcome import Outcome
    from foliolm.simulate.workload.options import WorkloadOptions

ROWS = (
    ("output tokens/s", ("output_tokens_per_s",), 1),
    ("TTFT, mean", ("ttft_s", "mean"), -1),
    ("TTFT, p99", ("ttft_s", "p99"), -1),
    ("gap between tokens, mean", ("itl_s", "mean"), -1),
    ("gap between tokens, p99", ("itl_s", "p99"), -1),
    ("whole request, mean", ("e2e_s", "mean"), -1),
    ("whole request, p99", ("e2e_s", "p99"), -1),
    ("queue, mean", ("queue_s", "mean"), -1),
)
"""What is compared: its name, where it stands in the numbers, and which way is better."""
WORTH = 0.05


def run_comparison(
    described: Described,
    options: WorkloadOptions,
    modes: Mapping[str, Mapping[str, Any]],
    seed: int,
    leap: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run each way of batching on the same workload and print them side by side."""
    from foliolm.cli.simulate import run_one

    outcomes: dict[str, Outcome] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, settings in modes.items():
        machine, _ = described.machine(settings)
        outcomes[name], wall_s = run_one(machine, options, seed, leap, described.adapters)
        numbers[name] = outcomes[name].to_json(wall_s)
        if outcomes[name].interrupted:
            break
    said = verdicts(numbers)
    if plot is not None:
        title = f"{described.setting.shape.name} on {described.setting.need_device().id}"
        save(plot, draw(outcomes, title))
    if as_json:
        print(json.dumps({"compare": numbers, "who_pays": said}, allow_nan=False))
        return
    _print(numbers, said)
    print("", file=sys.stderr)


def verdicts(numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For each way against the first: what gains by more than 5%, and what pays for it."""
    names = list(numbers)
    said = []
    for name in names[1:]:
        gains: list[str] = []
        losses: list[str] = []
        for text, path, sign in ROWS:
            one, other = at(numbers[names[0]], path), at(numbers[name], path)
            if not one or other is None:
                continue
            change = other / one - 1
            if abs(change) >= WORTH:
                (gains if sign * change > 0 else losses).append(f"{text} {change:+.0%}")
        if gains or losses:
            won = ", ".join(gains) or "nothing gains"
            paid = ", ".join(losses) or "nobody pays"
            said.append(f"{name} against {names[0]}: gains: {won}; pays: {paid}")
        else:
            said.append(f"{name} against {names[0]}: nothing changes by 5%")
    return said


def at(numbers: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """A number by its path."""
    found: Any = numbers
    for name in path:
        found = found[name]
    return None if found is None else float(found)


def _print(numbers: Mapping[str, Mapping[str, Any]], said: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table()
    table.add_column("")
    for name in numbers:
        table.add_column(name, justify="right")
    for text, path, sign in ROWS:
        values = [at(one, path) for one in numbers.values()]
        known = [value for value in values if value is not None]
        best = (max(known) if sign > 0 else min(known)) if known else None
        cells = [f"{value:,.0f}" if sign > 0 and value is not None else seconds(value) for value in values]
        table.add_row(
            text, *(f"[bold]{cell}[/]" if value == best else cell for cell, value in zip(cells, values, strict=True))
        )
    console.print(table)
    for line in said:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def draw(outcomes: Mapping[str, Outcome], title: str) -> Any:
    """Shares of requests below each time to first token, and below each time per output token, a line a way."""
    plt = pyplot()
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6), dpi=120, layout="constrained")
    for color, (name, outcome) in zip(COLORS * 2, outcomes.items(), strict=False):
        shares(both[0], [value / 1e9 for value in outcome.collector.ttft], color, name)
        shares(both[1], [value / 1e9 for value in outcome.collector.tpot], color, name)
    for axes, what in zip(both, ("time to first token, s", "time per output token, s"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(what)
        axes.set_ylabel("requests below, %")
        axes.legend(frameon=False)
    both[0].set_title(title, loc="left")
    finish(*both)
    plt.close(figure)
    return figure
