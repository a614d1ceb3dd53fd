"""``foliolm demo``: a real server, eight streamed answers at once, and what each reader saw of the time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foliolm.core.errors import ConfigError, EngineDeadError, FolioError

QUESTIONS = (
    "Complete the sentence: The capital of France is",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What is two plus three?",
    "Why is the sky blue? Answer in two sentences.",
    "Give me a short tip for sleeping well.",
    "Translate 'good morning' into Spanish.",
    "What does a librarian do?",
)
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class DemoAnswer:
    """One streamed answer, as its reader saw it.

    Attributes:
        question, answer: text.
        tokens: generated.
        ttft_s: seconds from sending the request to the first text.
        mean_gap_s: mean seconds between chunks of text.
        tokens_per_s: tokens over the seconds from sending to the end.
    """

    question: str
    answer: str
    tokens: int
    ttft_s: float
    mean_gap_s: float
    tokens_per_s: float


def demo(
    model: Annotated[str, typer.Argument(help="What to serve.")] = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 64,
    ledger: Annotated[
        str | None, typer.Option(help="A folder for the run's books; foliolm explain FOLDER reads them.")
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(help="A folder of LoRA adapters: each of them, and the bare model, is asked one question too."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Start a server on a free port, ask eight questions at once, show the answers and their times, stop the server.

    Example: foliolm demo --max-tokens 32
    """
    names = _adapter_folders(adapters)
    with _server(model, ledger, names) as address:
        started = time.perf_counter()
        answers = ask_all(address, max_tokens)
        seconds = time.perf_counter() - started
        voices = ask_voices(address, list(names), max_tokens) if names else {}
    total = sum(answer.tokens for answer in answers)
    if json_output:
        record = {
            "model": model,
            "seconds": round(seconds, 4),
            "output_tokens": total,
            "output_tokens_per_s": round(total / seconds, 2),
            "requests": [asdict(answer) for answer in answers],
        }
        if names:
            record["adapters"] = {name: asdict(answer) for name, answer in voices.items()}
        print(json.dumps(record))
        return
    _print(answers, total, seconds)
    if names:
        _print_voices(voices)
    if ledger is not None:
        print(f"where the time went: foliolm explain {ledger}")


def ask_all(address: str, max_tokens: int) -> list[DemoAnswer]:
    """All questions at once, each on a thread of its own, through the official client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(lambda question: _ask(client, name, question, max_tokens), QUESTIONS))


def ask_voices(address: str, adapters: Sequence[str], max_tokens: int) -> dict[str, DemoAnswer]:
    """One question to the bare model and to every adapter at once: their answers share a batch."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    models = [client.models.list().data[0].id, *adapters]
    with ThreadPoolExecutor(len(models)) as pool:
        return dict(
            zip(models, pool.map(lambda name: _ask(client, name, QUESTIONS[0], max_tokens), models), strict=True)
        )


def _adapter_folders(folder: Path | None) -> dict[str, Path]:
    """Adapters by name: the folder's own folders.

    Raises:
        ConfigError: there are none.
    """
    if folder is None:
        return {}
    found = {path.parent.name: path.parent for path in sorted(folder.glob("*/adapter_config.json"))}
    if not found:
        raise ConfigError(f"--adapters is {str(folder)!r}, which holds no folder with an adapter_config.json")
    return found


def _ask(client: Any, model: str, question: str, max_tokens: int) -> DemoAnswer:
    sent = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, stamps, tokens = [], [], 0
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            stamps.append(time.perf_counter())
    ended = time.perf_counter()
    gaps = [after - before for before, after in itertools.pairwise(stamps)]
    return DemoAnswer(
        question=question,
        answer="".join(pieces),
        tokens=tokens,
        ttft_s=round((stamps[0] if stamps else ended) - sent, 4),
        mean_gap_s=round(statistics.fmean(gaps), 4) if gaps else 0.0,
        tokens_per_s=round(tokens / (ended - sent), 2),
    )


@contextlib.contextmanager
def _server(model: str, ledger: str | None = None, adapters: Mapping[str, Path] | None = None) -> Iterator[str]:
    """A server in a process of its own; yields its address. Its lines go to stderr, so that stdout is the demo's."""
    command = [sys.executable, "-m", "foliolm", "serve", model, "--port", "0", "--shutdown-timeout", "5"]
    if ledger is not None:
        command += ["--ledger", ledger]
    if adapters:
        command += ["--enable-lora", *(f"--lora-modules={name}={path}" for name, path in adapters.items())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_relay, args=(process, lines), daemon=True).start()
    try:
        while True:
            line = lines.get()
            if line is None:
                code = process.wait()
                error = FolioError if code == 2 else EngineDeadError
                raise error(f"the server did not start (exit code {code}); its own words are above")
            if line.startswith("ready: "):
                yield line.split(" on ")[-1].strip()
                return
    finally:
        _stop(process)


def _relay(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _print_voices(voices: Mapping[str, DemoAnswer]) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"\n[bold]{QUESTIONS[0]}[/bold] (the bare model and {len(voices) - 1} adapters, in one batch)")
    for name, answer in voices.items():
        console.print(f"{name}: {answer.answer.strip()}", markup=False, highlight=False)


def _print(answers: list[DemoAnswer], total: int, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for answer in answers:
        console.print(f"\n[bold]{answer.question}[/bold]")
        console.print(answer.answer.strip(), markup=False, highlight=False)
    table = Table(title="Eight streams at once", title_justify="left")
    for name in ("question", "tokens", "TTFT", "mean gap", "tokens/s"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for answer in answers:
        table.add_row(
            answer.question,
            str(answer.tokens),
            f"{answer.ttft_s * 1e3:.0f} ms",
            f"{answer.mean_gap_s * 1e3:.0f} ms",
            f"{answer.tokens_per_s:.1f}",
        )
    console.print()
    console.print(table)
    console.print(f"{total} tokens in {seconds:.2f} s: {total / seconds:.1f} tokens/s over all streams")
