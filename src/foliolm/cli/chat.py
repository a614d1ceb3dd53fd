"""``foliolm chat``: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.cli.flags import engine_config, with_flags
from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.cli.chatting.backends import Backend

KEPT_LINES = 1000


def _chat(
    settings: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(help="What to load (smollm2-135m); with --url, a name that the server offers (its first)."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server to talk to, like http://127.0.0.1:8000; else the model is loaded."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key; else FOLIOLM_API_KEY.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    sampling_seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
) -> None:
    """Talk to a model in the terminal; answers come as they are made. /help lists what else can be done.

    Lines that are piped in are answered one after another. Examples: foliolm chat, foliolm chat --url
    http://127.0.0.1:8000 --system "Answer in one sentence."
    """
    from foliolm.cli.chatting.session import Session

    if url is not None and settings:
        name = next(iter(settings)).replace("_", "-")
        raise ConfigError(f"--{name} is a setting of an engine, and --url names a server, which has its own")
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": sampling_seed}
    options = {name: value for name, value in given.items() if value is not None}
    backend = _backend(model, url, api_key, settings)
    try:
        if sys.stdin.isatty():
            print(f"{backend.name}; /help lists commands, Ctrl-D ends", file=sys.stderr)
        _talk(Session(backend, _write, system, options))
    finally:
        backend.close()


chat = with_flags(_chat)
chat.__name__ = "chat"


def _backend(model: str | None, url: str | None, api_key: str | None, settings: dict[str, Any]) -> Backend:
    from foliolm.cli.chatting.backends import LocalBackend, RemoteBackend

    if url is not None:
        return RemoteBackend(url, api_key or os.environ.get("FOLIOLM_API_KEY", "").split(",")[0] or None, model)
    config = engine_config(model or "smollm2-135m", settings)
    # One reader needs no large batch; a fast start matters more.
    lean = {"max_num_seqs": 1} if "max_num_seqs" not in settings else {}
    return LocalBackend(config.model, {**lean, **settings}, lambda line: print(line, file=sys.stderr, flush=True))


def _talk(session: Any) -> None:
    with _line_history():
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                if sys.stdin.isatty():
                    print(file=sys.stderr)
                return
            if not session.take(line):
                return


def _write(text: str) -> None:
    print(text, end="", flush=True)


@contextlib.contextmanager
def _line_history() -> Any:
    """Lines that were typed before come back with the arrow keys, also those of earlier runs."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # a Python that was built without it
        yield
        return
    path = Path(os.environ.get("FOLIOLM_HOME", "~/.cache/foliolm")).expanduser() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(KEPT_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
