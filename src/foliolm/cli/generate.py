"""``foliolm generate``: answer a file of requests."""

from __future__ import annotations

import json as jsonlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from foliolm.cli.flags import engine_config, with_flags
from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.api.batch import BatchOutput, BatchRequest, Counts
    from foliolm.core.config import EngineConfig
    from foliolm.weights.checkpoint import LoadFormat

    Progress = Callable[[Counts], None]

DEFAULT_CONCURRENCY = 64


def _generate(
    settings: dict[str, Any],
    input_file: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, in OpenAI's batch format.")],
    output_file: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers; one that exists is gone on with.")],
    model: Annotated[str, typer.Option(help="Built-in name, repository id, folder or GGUF file.")] = "smollm2-135m",
    concurrency: Annotated[int, typer.Option(help="Requests that are handed to the engine at once.")] = (
        DEFAULT_CONCURRENCY
    ),
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Ask again where the answer is an error.")] = (
        False
    ),
    json_output: Annotated[bool, typer.Option("--json", help="Print one line of JSON about the run.")] = False,
) -> None:
    """Answer a file of requests, in this machine's own engine; no server is needed.

    A line is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {…}}; its
    answer is {"custom_id": …, "response": {"status_code": …, "body": {…}}, …}. After Ctrl-C, or worse, the same command
    goes on where it was; the output is the same as if nothing had happened. Requests without a seed get one that
    follows from --seed (0) and their custom_id.

    Example: foliolm generate questions.jsonl answers.jsonl --model smollm2-135m
    """
    from foliolm.api.batch import BatchOutput, read_requests

    if not 1 <= concurrency <= 4096:
        raise ConfigError(f"--concurrency is {concurrency}; it must be from 1 to 4096")
    config = engine_config(model, settings)
    requests = read_requests(input_file)
    known = frozenset(request.custom_id for request in requests)
    with BatchOutput(output_file).opened(known, retry_failed) as output:
        began = time.monotonic()
        counts = _run(config, requests, output, concurrency)
    seconds = time.monotonic() - began
    _report(counts, seconds, json_output)


generate = with_flags(_generate)
generate.__name__ = "generate"


def _run(config: EngineConfig, requests: list[BatchRequest], output: BatchOutput, concurrency: int) -> Counts:
    from foliolm.api.adapters import Adapters
    from foliolm.api.app import build_app
    from foliolm.api.batch import Counts
    from foliolm.api.launch import start_engine
    from foliolm.api.service import Service
    from foliolm.cli.pull import progress_bar
    from foliolm.ledger.metrics import Metrics
    from foliolm.weights.store import pull

    if all(request.custom_id in output.done for request in requests):
        output.put_in_order(requests)
        failed = sum(failed for _, _, failed in output.done.values())
        return Counts(len(requests), len(requests), failed, len(requests))
    signal.signal(signal.SIGTERM, _terminated)
    with progress_bar() as progress:
        files = pull(config.model, progress=progress, load_format=cast("LoadFormat", config.load_format))
    metrics = Metrics(config.model)
    started = start_engine(config, files, _say, metrics)
    try:
        adapters = Adapters(started.client, config.lora_paths, config.enable_lora, started.model.names)
        service = Service(started.model, started.client, metrics, config.scheduling_policy, adapters=adapters)
        width = min(concurrency, config.max_queued_requests)
        return _with_signals(build_app(service), service, requests, output, width, config.seed or 0)
    finally:
        started.client.close()


def _with_signals(
    app: Any, service: Any, requests: list[BatchRequest], output: BatchOutput, width: int, seed: int
) -> Counts:
    import asyncio

    from foliolm.api.batch import run_batch

    async def run(show: Progress) -> Counts:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        service.client.attach()
        return await run_batch(app, requests, output, width, seed, show)

    with _bar(len(requests)) as show:
        try:
            return asyncio.run(run(show))
        except (KeyboardInterrupt, asyncio.CancelledError):
            _say(f"interrupted: {len(output.done)} of {len(requests)} are answered; the same command goes on there")
            raise KeyboardInterrupt from None
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    """A bar on stderr, or a line at every tenth where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    began = time.monotonic()
    shown = -1
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, rate="")

        def show(counts: Counts) -> None:
            nonlocal shown
            rate = f"{counts.output_tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s"
            bar.update(task, completed=counts.done, rate=rate)
            tenth = counts.done * 10 // total
            if not console.is_terminal and tenth != shown:
                shown = tenth
                _say(f"{counts.done} of {total} answered")

        yield show


def _report(counts: Counts, seconds: float, json_output: bool) -> None:
    if json_output:
        record = {
            "requests": counts.total,
            "answered": counts.done,
            "failed": counts.failed,
            "resumed": counts.resumed,
            "output_tokens": counts.output_tokens,
            "seconds": round(seconds, 3),
        }
        print(jsonlib.dumps(record))
        return
    resumed = f", {counts.resumed} of them by earlier runs" if counts.resumed else ""
    print(
        f"{counts.done} of {counts.total} answered{resumed}; {counts.failed} with an error; "
        f"{counts.output_tokens} tokens in {seconds:.1f} s"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
