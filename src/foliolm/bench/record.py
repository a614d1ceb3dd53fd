"""What was sent, as a trace in our own format, which ``foliolm simulate --format jsonl`` reads back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foliolm.bench.answer import Answer
from foliolm.bench.prompts import BLOCK
from foliolm.core.errors import ConfigError

_S = 1e-9


def check_writable(path: Path) -> None:
    """See before the run whether the record can be written after it.

    Raises:
        ConfigError: it cannot.
    """
    if path.is_dir():
        raise ConfigError(f"--record {path} is a folder; it must be a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = _draft(path)
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror or error}") from None


def write_record(path: Path, answers: Iterable[Answer], start_ns: int) -> int:
    """One line a request, in the order in which they were due; returns how many.

    Beside what the trace format asks for, a line has what was measured: ``sent_s`` on the same clock, ``ttft_s`` and
    ``e2e_s`` from when it was due, and ``error``. A failed request stands with the length that was asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    ordered = sorted(answers, key=lambda answer: (answer.due_ns, answer.number))
    draft = _draft(path)
    try:
        with draft.open("w", encoding="utf-8") as file:
            for answer in ordered:
                file.write(json.dumps(_line(answer, start_ns)) + "\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror or error}") from None
    return len(ordered)


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _line(answer: Answer, start_ns: int) -> dict[str, Any]:
    item = answer.item
    said = answer.prompt_tokens
    line: dict[str, Any] = {
        "time_s": round((answer.due_ns - start_ns) * _S, 9),
        "input_tokens": said or item.num_prompt,
        "output_tokens": item.num_output if answer.error else max(1, answer.num_output),
    }
    if answer.blocks:
        line |= {"hash_ids": answer.blocks, "block_size": BLOCK}
    if answer.sent_ns:
        line["sent_s"] = round((answer.sent_ns - start_ns) * _S, 9)
    if answer.error:
        line["error"] = answer.error
    elif answer.first_ns:
        line["ttft_s"] = round((answer.first_ns - answer.due_ns) * _S, 9)
        line["e2e_s"] = round((answer.last_ns - answer.due_ns) * _S, 9)
    return line
