"""``foliolm plan``: the arithmetic of serving, at once."""

from __future__ import annotations

import importlib
import sys

import typer

from foliolm.cli.oneline import OneLineCommand, OneLineGroup

# Name → (module, one line of help). Only the command that is called is imported.
COMMANDS = {
    "read": "Bytes that decode reads for each token, by batch; the knee.",
    "latency": "Time to first token, decode time and the whole.",
    "paging": "What blocks save against whole reservation, and cost.",
    "lora": "What adapters take beside the KV.",
    "capacity": "The memory sum line by line, and how many sequences fit.",
    "chunk": "The gaps that a chunked prefill opens in running streams.",
    "swap": "Swap a request's KV, or compute it again.",
    "step": "One step's predicted seconds, term by term.",
    "chat": "How many chat users fit, what binds, what would help.",
}


def build_app(chosen: str | None) -> typer.Typer:
    """The sub-application in which only the chosen command is loaded; None loads all."""
    app = typer.Typer(
        name="plan",
        cls=OneLineGroup,
        help="What a model needs on a device, what binds it and what to change: arithmetic, no model is run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for name, text in COMMANDS.items():
        if chosen is None or name == chosen:
            module = importlib.import_module(f"foliolm.cli.planning.{name}")
            app.command(name, cls=OneLineCommand, epilog=module.EXAMPLE, short_help=text)(getattr(module, name))
        else:
            app.command(name, cls=OneLineCommand, help=text)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("only the chosen command can be called")


def _chosen() -> str:
    """The plan command that this process was started for, or an empty word where none is named."""
    return next((word for word in sys.argv[1:] if word in COMMANDS), "")


app = build_app(_chosen() if "plan" in sys.argv[1:2] else None)

if __name__ == "__main__":
    app()
