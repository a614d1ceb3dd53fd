"""``foliolm serve``."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from foliolm.api.options import ServerOptions
from foliolm.cli.flags import ENGINE_FLAGS, FlagGroup, engine_config, with_flags

if TYPE_CHECKING:
    from foliolm.api.served_model import ServedModel
    from foliolm.engine.engine import EngineInfo
    from foliolm.weights.checkpoint import LoadFormat


def _serve(
    settings: dict[str, Any],
    server: dict[str, Any],
    model: Annotated[
        str, typer.Argument(help="Built-in name, Hugging Face repository id, folder or GGUF file.")
    ] = "smollm2-135m",
) -> None:
    """Serve a model over the OpenAI API. What is missing is fetched first.

    Example: foliolm serve smollm2-135m --port 8000 --max-num-seqs 64
    """
    # Everything that can be wrong by itself is looked at before a model is fetched or memory is taken.
    config = engine_config(model, settings)
    options = ServerOptions(**server)
    from foliolm.api.listener import bind

    signal.signal(signal.SIGTERM, _terminated)
    listener = bind(options.host, options.port)
    address = f"{options.scheme}://{_url_host(options.host)}:{listener.getsockname()[1]}"
    try:
        from foliolm.api.launch import run_server
        from foliolm.cli.pull import progress_bar
        from foliolm.weights.store import pull

        with progress_bar() as progress:
            files = pull(config.model, progress=progress, load_format=cast("LoadFormat", config.load_format))
        said: set[str] = set()

        def report(line: str) -> None:
            said.add(line)
            _say(line)

        run_server(config, files, listener, options, report, lambda served, info: _ready(served, info, address, said))
    finally:
        listener.close()
    _say("stopped")


serve = with_flags(_serve, (FlagGroup("server", ServerOptions, "Server"), ENGINE_FLAGS))
serve.__name__ = "serve"


def _terminated(number: int, frame: object) -> None:
    # While the model is loading; an exception, so that the engine's process and its sockets are cleaned up. Once the
    # server runs, it has handlers of its own.
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, flush=True)


def _ready(served: ServedModel, info: EngineInfo, address: str, said: set[str]) -> None:
    for line in info.summary:
        if line not in said:
            _say(line)
    if served.chat_template is None:
        _say("chat is off: the model has no chat template (--chat-template FILE gives one); /v1/completions works")
    asked = "Complete the sentence: The capital of France is"
    question = f'{{"messages": [{{"role": "user", "content": "{asked}"}}], "temperature": 0}}'
    _say(
        f"\nready: {served.name} on {address}\n\n"
        f"  curl -s {address}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{question}'\n\n"
        "  from openai import OpenAI\n"
        f'  client = OpenAI(base_url="{address}/v1", api_key="none")\n'
        f'  answer = client.chat.completions.create(model="{served.name}",\n'
        '      messages=[{"role": "user", "content": "Complete the sentence: The capital of France is"}])\n'
        "  print(answer.choices[0].message.content)\n"
    )


def _url_host(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown
