"""The request log: a line of JSON for each request, written off the event loop."""

from __future__ import annotations

import queue
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.api.generation import Generation

MAX_PENDING = 10_000
"""Lines that may wait to be written. A file that takes none any more must not stop the server, nor fill its memory."""


class RequestLog:
    """Writes lines in a thread of its own, so that a full disk or a stopped pipe blocks nobody.

    Args:
        path: the file, which is appended to; ``-`` is stderr.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO = sys.stderr if path == "-" else open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--request-log is {path!r}, which cannot be written: {error.strerror}") from None
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_PENDING)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Hand over a line; where too many wait, it is dropped, and the next one says how many were."""
        if self._num_dropped:
            entry = {**entry, "dropped_before": self._num_dropped}
        try:
            self._lines.put_nowait(msgspec.json.encode(entry).decode() + "\n")
        except queue.Full:
            self._num_dropped += 1
        else:
            self._num_dropped = 0

    def close(self) -> None:
        """Write what waits, for at most a second."""
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(1)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
                self._file.flush()
            except (OSError, ValueError) as error:
                print(f"foliolm: the request log cannot be written: {error}", file=sys.stderr)
                return


def now() -> str:
    """The wall clock, for people: it is a label, no measure."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def figures(generation: Generation) -> dict[str, Any]:
    """What the log says of a generation. Seconds are of the engine's clock, over all choices."""
    choices = generation.choices
    stamps = [choice.stamps for choice in choices if choice.stamps is not None]
    first = [stamp.first_token_ns - stamp.arrival_ns for stamp in stamps if stamp.first_token_ns]
    queued = [stamp.admitted_ns - stamp.queued_ns for stamp in stamps if stamp.admitted_ns]
    dead = next((choice.dead for choice in choices if choice.dead is not None), None)
    entry: dict[str, Any] = {
        "prompt_tokens": generation.num_prompt_tokens,
        "output_tokens": generation.num_output_tokens,
        "cached_tokens": generation.num_cached_tokens,
        "finish_reasons": [choice.finish_reason for choice in choices],
        "queue_s": round(max(queued) * 1e-9, 6) if queued else None,
        "first_token_s": round(min(first) * 1e-9, 6) if first else None,
        "preemptions": sum(stamp.num_preemptions for stamp in stamps),
    }
    if dead is not None:
        entry["error"] = str(dead)
    return entry
