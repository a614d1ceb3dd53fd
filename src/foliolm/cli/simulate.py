"""``foliolm simulate``: workloads without a device."""

from __future__ import annotations

import typer

from foliolm.cli import simulate_prefix
from foliolm.cli.oneline import OneLineCommand, OneLineGroup

app = typer.Typer(
    name="simulate",
    cls=OneLineGroup,
    help="What a workload comes to, without a device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def simulate() -> None:
    """What a workload comes to, without a device."""


app.command("prefix", cls=OneLineCommand, epilog=simulate_prefix.EXAMPLE)(simulate_prefix.prefix)
