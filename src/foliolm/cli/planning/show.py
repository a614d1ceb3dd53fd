"""Print a report: one line of JSON, or tables and a sentence."""

from __future__ import annotations

import json

from foliolm.plan.report import Report


def show(report: Report, as_json: bool) -> None:
    """Print ``report`` on stdout."""
    if as_json:
        print(json.dumps(report.to_json(), allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console = Console(width=160)
    for content in report.tables:
        table = Table(title=content.title, title_justify="left", title_style="bold")
        for i, column in enumerate(content.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in content.rows:
            table.add_row(*row)
        console.print(table)
    console.print(report.verdict, highlight=False, markup=False, soft_wrap=not console.is_terminal)
