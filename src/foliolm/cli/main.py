"""The ``foliolm`` command. A command's module, and what it needs, is imported only when it is called."""

from __future__ import annotations

import importlib
import inspect
import sys

import typer

from foliolm.core.errors import EngineDeadError, FolioError
from foliolm.version import __version__

# Name → (module, attribute, one line of help). The attribute is a function, or a Typer app of sub-commands.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("foliolm.cli.serve", "serve", "Serve a model over the OpenAI API."),
    "pull": ("foliolm.cli.pull", "pull", "Fetch a model, so that it can be served offline."),
    "chat": ("foliolm.cli.chat", "chat", "Talk to a model in the terminal, served or in this process."),
    "generate": ("foliolm.cli.generate", "generate", "Answer a file of requests in OpenAI's batch format; resumable."),
    "demo": ("foliolm.cli.demo", "demo", "Start a server, stream eight answers at once, show the times, stop it."),
    "kv": ("foliolm.cli.kv", "kv", "Who holds a server's KV memory, what is shared, and what the cache finds."),
    "explain": ("foliolm.cli.explain", "explain", "Where a recorded run's time went, and what to change."),
    "calibrate": ("foliolm.cli.calibrate", "calibrate", "Fit the step cost to a ledger's steps, or to a vLLM log."),
    "validate": ("foliolm.cli.validate", "validate", "Measured runs again in virtual time, and how far off that is."),
    "plan": ("foliolm.cli.plan", "app", "What a model needs on a device, and what binds it: arithmetic only."),
    "simulate": ("foliolm.cli.simulate", "app", "What a workload will do on a device, ahead of time."),
    "bench": ("foliolm.cli.bench", "bench", "A workload against a live server, measured, and predicted beside it."),
    "doctor": ("foliolm.cli.doctor", "doctor", "Which kernels run on this machine, and why."),
    "probe": ("foliolm.cli.probe", "probe", "Measure this machine's memory and matmul rates."),
}


def build_app(chosen: str | None) -> typer.Typer:
    """The application in which only the chosen command is loaded; of the others, only name and help are known."""
    app = typer.Typer(
        name="foliolm",
        help="FolioLM: an LLM serving engine that keeps its books.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
        if version:
            typer.echo(f"foliolm {__version__}")
            raise typer.Exit

    for name, (module, attribute, text) in COMMANDS.items():
        if name != chosen:
            app.command(name, help=text)(_not_loaded)
            continue
        loaded = getattr(importlib.import_module(module), attribute)
        if isinstance(loaded, typer.Typer):
            own = loaded.registered_callback
            about = own.callback.__doc__ if own is not None and own.callback is not None else None
            app.add_typer(loaded, name=name, help=inspect.cleandoc(about) if about else text)
        else:
            app.command(name)(loaded)

    @app.command("version", help="Print the version.")
    def version_command() -> None:
        typer.echo(f"foliolm {__version__}")

    return app


def main() -> None:
    """Entry point. Exit codes: 2 for wrong input, 1 for a failure while running, 130 for Ctrl-C."""
    chosen = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        build_app(chosen)()
    except EngineDeadError as error:
        _end(error, 1)
    except FolioError as error:
        _end(error, 2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "foliolm":
            raise
        print(
            f"foliolm: {chosen} needs the package {error.name!r}; install it with: pip install 'foliolm[serve]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _not_loaded() -> None:
    raise AssertionError("only the chosen command can be called")


def _end(error: Exception, code: int) -> None:
    print(f"foliolm: {error}", file=sys.stderr)
    sys.exit(code)
