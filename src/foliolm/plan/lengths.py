"""Sequence lengths from a trace: the public formats, or plain numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from foliolm.core.errors import ConfigError

# Columns that hold a request's tokens in and out, by trace: Azure's CSV, Mooncake's JSON lines, vLLM bench records.
PAIRS = (
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
    ("input_toks", "output_toks"),
    ("input_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
)


def lengths_of_trace(path: Path) -> list[int]:
    """Tokens in plus out of each request.

    Args:
        path: a CSV file with a header, JSON lines, or one number a line.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ConfigError(f"trace {path} is empty")
    if lines[0].lstrip().startswith("{"):
        return [_of_record(_json(path, i, line), f"trace {path} line {i}") for i, line in enumerate(lines, 1)]
    if "," in lines[0]:
        return [_of_record(row, f"trace {path} line {i}") for i, row in enumerate(csv.DictReader(lines), 2)]
    return [_number(line, f"trace {path} line {i}") for i, line in enumerate(lines, 1)]


def _json(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"trace {path} line {number} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"trace {path} line {number} is not a JSON object")
    return record


def _of_record(record: dict[str, object], where: str) -> int:
    for one, other in PAIRS:
        if one in record and other in record:
            return _number(record[one], f"{where}: {one}") + _number(record[other], f"{where}: {other}")
    known = " or ".join(f"{one}, {other}" for one, other in PAIRS)
    raise ConfigError(f"{where} has no token counts; it needs {known}")


def _number(value: object, where: str) -> int:
    try:
        number = int(str(value))
    except ValueError:
        raise ConfigError(f"{where} is {value!r}; it must be an integer") from None
    if number < 0:
        raise ConfigError(f"{where} is {number}; it must be at least 0")
    return number
