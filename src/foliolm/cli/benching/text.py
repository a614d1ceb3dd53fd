"""A measured run, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foliolm.bench.checks import TEXTS
from foliolm.bench.report import COMPARED
from foliolm.cli.simulating.text import SPREADS, seconds

TOLERANCE = 0.01
"""By how much a run's tokens may differ from those asked for before a prediction is of another workload."""


def warnings_of(numbers: Mapping[str, Any]) -> list[str]:
    """A line for everything that a reader must know before believing the numbers."""
    lines = [
        f"failed: {found['count']} × {kind}; the first: {found['first']}" for kind, found in numbers["errors"].items()
    ]
    lines += [
        f"{found['count']} {TEXTS[kind]}; the first: {found['first']}" for kind, found in numbers["checks"].items()
    ]
    if numbers["broken_off"]:
        lines.append(f"the workload could not be read to its end: {numbers['broken_off']}")
    if numbers["interrupted"]:
        lines.append(
            f"interrupted: the numbers are of the {numbers['requests']} requests that were done; "
            f"{numbers['unfinished']} more were under way"
        )
    for sign in numbers["client"]["bottleneck"]:
        lines.append(f"the client is the bottleneck: {sign}; give it cores of its own, or less to send")
    if numbers.get("predicted") is not None:
        for what in ("prompt", "output"):
            came, asked = numbers[f"{what}_tokens"], numbers[f"{what}_tokens_asked"]
            if abs(came - asked) > TOLERANCE * asked:
                lines.append(f"the prediction is of {asked} {what} tokens, the measurement of {came}")
    return lines


def print_bench(numbers: Mapping[str, Any]) -> None:
    """Print the numbers of one run, and beside them what was predicted."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    predicted = numbers.get("predicted")
    table = Table(title=f"{numbers['model']} at {numbers['url']}", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for key in COMPARED:
        table.add_row(SPREADS[key], *(seconds(value) for value in numbers[key].values()))
        if predicted is not None:
            table.add_row("  predicted", *(seconds(value) for value in predicted[key].values()), style="dim")
            off = (numbers["difference"] or {}).get(key, {}).values()
            table.add_row("  difference", *("—" if value is None else f"{value:+.1%}" for value in off), style="dim")
    console.print(table)
    console.print(_sentence(numbers), highlight=False, markup=False, soft_wrap=True)


def _sentence(numbers: Mapping[str, Any]) -> str:
    hits, late = numbers["prefix_hit_ratio"], numbers["client"]["send_late_s"]
    text = (
        f"{numbers['requests']:,} requests in {numbers['measured_s']:,.1f} s: {numbers['output_tokens_per_s']:,.1f} "
        f"output tokens/s, {numbers['requests_per_s']:.3g} requests/s; {numbers['failed']:,} failed"
    )
    if hits is not None:
        text += f"; prefix hits {hits:.1%}"
    text += (
        f". Sent at most {seconds(late['max'])} late, {numbers['client']['most_in_flight']:,} at once over "
        f"{numbers['client']['connections']:,} connections."
    )
    predicted = numbers.get("predicted")
    if predicted is not None:
        text += (
            f"\nPredicted: {predicted['output_tokens_per_s']:,.1f} output tokens/s, "
            f"{predicted['requests_per_s']:.3g} requests/s."
        )
    return text
