"""What a plan says: numbers for programs, tables for people, and a sentence on what binds and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text.

    Attributes:
        title, columns: headings; a column's heading holds its unit.
        rows: one text a cell.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One plan.

    Attributes:
        numbers: bytes, seconds and plain numbers, by the documented keys.
        verdict: what binds and what to change, in a sentence or a few.
        tables: the same numbers for people.
    """

    numbers: dict[str, Any]
    verdict: str
    tables: tuple[Table, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The numbers and, under ``verdict``, the sentence."""
        return {**self.numbers, "verdict": self.verdict}


def sentences(*parts: str | None) -> str:
    """Join sentences, leaving out those that have nothing to say."""
    return " ".join(part for part in parts if part)


def rows(values: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], ...]:
    """Name and value pairs as table rows."""
    return tuple((name, value) for name, value in values)


def size(value: float) -> str:
    """Bytes for people, in binary units."""
    if abs(value) >= GIB:
        return f"{value / GIB:,.4g} GiB" if abs(value) < 1000 * GIB else f"{value / GIB:,.0f} GiB"
    if abs(value) >= MIB:
        return f"{value / MIB:,.4g} MiB"
    return f"{value / 1024:,.4g} KiB" if abs(value) >= 1024 else f"{value:,.0f} B"


def span(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def count(value: float) -> str:
    """A count for people."""
    return f"{value:,.0f}"


def share(value: float) -> str:
    """A share as per cent."""
    return f"{value * 100:.3g} %"


def in_words(value: float) -> str:
    """A share in words where a plain fraction is near, else in per cent: ``a third``, ``58.8 %``."""
    fractions = {
        1 / 10: "a tenth",
        1 / 5: "a fifth",
        1 / 4: "a quarter",
        1 / 3: "a third",
        1 / 2: "half",
        2 / 3: "two thirds",
        3 / 4: "three quarters",
    }
    near = min(fractions, key=lambda fraction: abs(fraction - value))
    return fractions[near] if abs(near - value) <= 0.03 * max(near, 1 / 3) else share(value)
