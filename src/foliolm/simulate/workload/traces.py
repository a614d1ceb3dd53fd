"""Recorded workloads: public traces in their own formats, measured runs, and our own JSON lines.

Every reader is a stream: a trace of any length takes the memory of a row. Rows must stand in order of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import NS, Item
from foliolm.simulate.workload.rows import Row, csv_rows, json_rows

Entry = tuple[float, Item]
"""Seconds as recorded, and the item whose time is not set yet."""


class Trace:
    """Items of a recorded workload, the first at 0.

    Args:
        path: a file, or the folder that the format asks for.
        format: one of ``FORMATS``.
        time_scale: intervals are multiplied by it: 0.5 is twice the load.
        limit: most items; None: all.
        seed: of formats that describe what is drawn.
    """

    def __init__(
        self, path: Path, format: str, time_scale: float = 1.0, limit: int | None = None, seed: int = 0
    ) -> None:
        if format not in FORMATS:
            raise ConfigError(f"--format is {format!r}; it must be one of {', '.join(sorted(FORMATS))}")
        if not path.exists():
            raise ConfigError(f"--trace {path}: there is no such file or folder")
        if not 1e-6 <= time_scale <= 1e6:
            raise ConfigError(f"--time-scale is {time_scale}; it must be from 0.000001 to 1,000,000")
        if limit is not None and limit < 1:
            raise ConfigError(f"--requests is {limit}; it must be at least 1")
        self._path, self._read, self._seed = path, FORMATS[format], seed
        self._scale, self._limit = time_scale, limit
        self.total: int | None = None
        if path.is_file():
            with path.open("rb") as file:
                lines = sum(1 for _ in file) - (format in ("azure", "burstgpt"))
            self.total = lines if limit is None else min(limit, lines)

    def items(self) -> Iterator[Item]:
        """In order of time.

        Raises:
            ConfigError: a row is wrong, time goes back, or there is none.
        """
        first = last = None
        for seconds, item in islice(self._read(self._path, self._seed), self._limit):
            first = seconds if first is None else first
            if last is not None and seconds < last:
                raise ConfigError(f"trace {self._path}: time goes back from {last} to {seconds} s; sort it by time")
            last = seconds
            time_ns = round((seconds - first) * self._scale * NS)
            yield Item(
                time_ns,
                item.num_prompt,
                item.num_output,
                item.content,
                item.answer,
                item.session,
                item.turn,
                item.label,
            )
        if first is None:
            raise ConfigError(f"trace {self._path} holds no request")

    def after(self, item: Item, now_ns: int) -> Iterable[Item]:
        """Nothing: what was recorded came when it came."""
        return ()


def _azure(path: Path, seed: int) -> Iterator[Entry]:
    """Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``."""
    for row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        text = row.text("TIMESTAMP")
        try:  # seven digits of a second's fraction are one more than Python knows
            head, _, fraction = text.partition(".")
            seconds = datetime.fromisoformat(head + "+00:00").timestamp() + (float("0." + fraction) if fraction else 0)
        except ValueError:
            raise ConfigError(f"{row.where}: TIMESTAMP is {text!r}; it must be a date and a time") from None
        yield seconds, _item(row, "ContextTokens", "GeneratedTokens")


def _burstgpt(path: Path, seed: int) -> Iterator[Entry]:
    """BurstGPT: seconds and counts; requests that failed (no response tokens) are left out, as its authors do."""
    for row in csv_rows(path, ("Timestamp", "Request tokens", "Response tokens")):
        if row.whole("Response tokens") and row.whole("Request tokens"):
            yield row.real("Timestamp"), _item(row, "Request tokens", "Response tokens")


def _mooncake(path: Path, seed: int) -> Iterator[Entry]:
    """Mooncake (FAST'25): milliseconds, lengths, and a hash for every 512 tokens of prefix."""
    for row in json_rows(path):
        yield row.real("timestamp") / 1e3, _item(row, "input_length", "output_length", "hash_ids", 512)


def _bailian(path: Path, seed: int) -> Iterator[Entry]:
    """Qwen-Bailian: seconds, lengths, turns of conversations, and a hash for every 16 tokens."""
    for row in json_rows(path):
        found = _item(row, "input_length", "output_length", "hash_ids", 16)
        turn = max(0, row.whole("turn") - 1) if "turn" in row.fields else 0
        yield row.real("timestamp"), Item(0, found.num_prompt, found.num_output, found.content, 0, -1, turn)


def _jsonl(path: Path, seed: int) -> Iterator[Entry]:
    """Our own: ``{"time_s", "input_tokens", "output_tokens"}``, and where known ``hash_ids`` with ``block_size``."""
    for row in json_rows(path):
        block = row.whole("block_size", 1) if row.fields.get("hash_ids") else 16
        yield row.real("time_s"), _item(row, "input_tokens", "output_tokens", "hash_ids", block)


def _vllm_run(path: Path, seed: int) -> Iterator[Entry]:
    """A measured run's folder: arrivals by its wall clock, and where there are any the prompts' 16-token blocks."""
    blocks: dict[str, list[int]] = {}
    known = path / "prefix_blocks16.jsonl"
    if known.is_file():
        blocks = {row.text("request_id"): row.wholes("hash_ids") for row in json_rows(known)}
    for row in sorted(json_rows(path / "requests.jsonl"), key=lambda row: row.real("arrival_time")):
        name = row.text("request_id")
        content = _content(blocks.get(name, []), 16)
        prompt, output = row.whole("input_toks", 1), row.whole("output_toks", 1)
        yield row.real("arrival_time"), Item(0, prompt, output, content, label=name)


def _servegen(path: Path, seed: int) -> Iterator[Entry]:
    from foliolm.simulate.workload.servegen import servegen_entries

    return servegen_entries(path, seed)


FORMATS: dict[str, Callable[[Path, int], Iterator[Entry]]] = {
    "azure": _azure,
    "bailian": _bailian,
    "burstgpt": _burstgpt,
    "jsonl": _jsonl,
    "mooncake": _mooncake,
    "servegen": _servegen,
    "vllm-run": _vllm_run,
}


def _item(row: Row, prompt: str, output: str, hashes: str = "", block: int = 16) -> Item:
    content = _content(row.wholes(hashes), block) if hashes else ()
    # Traces know requests that were cut off before their first token; an engine always gives one.
    return Item(0, row.whole(prompt, 1), max(1, row.whole(output)), content)


def _content(hashes: list[int], block: int) -> tuple[tuple[int, int], ...]:
    return tuple((value, block) for value in hashes)
