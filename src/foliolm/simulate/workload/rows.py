"""Reading rows of trace files, with errors that name file, line and field."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foliolm.core.errors import ConfigError


class Row:
    """One row: fields by name, and where it stands.

    Args:
        fields: as read.
        file: that it stands in.
        line: counted from 1.
    """

    __slots__ = ("fields", "file", "line")

    def __init__(self, fields: dict[str, Any], file: Path, line: int) -> None:
        self.fields = fields
        self.file = file
        self.line = line

    @property
    def where(self) -> str:
        """File and line, for errors."""
        return f"{self.file} line {self.line}"

    def text(self, name: str) -> str:
        """A field as text."""
        value = self.fields.get(name)
        if value is None:
            raise ConfigError(f"{self.where}: field {name!r} is missing")
        return str(value)

    def real(self, name: str) -> float:
        """A finite number."""
        try:
            value = float(self.text(name))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{self.where}: {name} is {self.fields[name]!r}; it must be a finite number")
        return value

    def whole(self, name: str, low: int = 0) -> int:
        """A whole number of at least ``low``."""
        value = self.real(name)
        if value != int(value) or value < low:
            raise ConfigError(f"{self.where}: {name} is {self.fields[name]!r}; it must be a whole number from {low} on")
        return int(value)

    def wholes(self, name: str) -> list[int]:
        """A list of whole numbers; empty where the field is missing or null."""
        value = self.fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{self.where}: {name} must be a list of whole numbers")
        return value


def csv_rows(path: Path, needed: tuple[str, ...]) -> Iterator[Row]:
    """Rows of a CSV file with a header.

    Raises:
        ConfigError: it cannot be read, or a column is missing.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = next(reader, None)
            missing = [name for name in needed if name not in (names or ())]
            if names is None or missing:
                raise ConfigError(f"{path}: column {missing[0]!r} is missing; the header is {names}")
            for values in reader:
                if values:
                    yield Row(dict(zip(names, values, strict=False)), path, reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None


def json_rows(path: Path) -> Iterator[Row]:
    """Rows of a file of JSON lines; empty lines are passed over.

    Raises:
        ConfigError: it cannot be read, or a line is no JSON object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    fields = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{path} line {number}: it is no JSON: {error}") from None
                if not isinstance(fields, dict):
                    raise ConfigError(f"{path} line {number}: it must hold a JSON object")
                yield Row(fields, path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
