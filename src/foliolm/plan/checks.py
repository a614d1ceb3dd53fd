"""Checks of what a user typed: the error names the field, the value and the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foliolm.core.errors import ConfigError

MOST_ROWS = 2**20
MOST_TOKENS = 2**40


def whole(field: str, value: int, low: int = 1, high: int = MOST_TOKENS) -> int:
    """An integer within limits.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field} is {value!r}; it must be an integer")
    if value < low or value > high:
        raise ConfigError(f"{field} is {value}; it must be from {low} to {high}")
    return value


def wholes(field: str, values: Sequence[int], low: int = 1, high: int = MOST_TOKENS) -> tuple[int, ...]:
    """At least one integer, each within limits.

    Raises:
        ConfigError: there is none, or one is out of limits.
    """
    if not values:
        raise ConfigError(f"{field} is empty; give at least one number")
    return tuple(whole(field, value, low, high) for value in values)


def real(field: str, value: float, low: float = 0.0, high: float = math.inf, above: bool = False) -> float:
    """A finite number within limits (``above``: the low one excluded).

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{field} is {value!r}; it must be a finite number")
    if value < low or value > high or (above and value == low):
        bound = f"above {low:g}" if above else f"at least {low:g}"
        limit = bound if math.isinf(high) else f"{bound} and at most {high:g}"
        raise ConfigError(f"{field} is {value:g}; it must be {limit}")
    return float(value)


def needed(field: str, value: object, why: str) -> None:
    """Refuse a value that was not given.

    Raises:
        ConfigError: it is None.
    """
    if value is None:
        raise ConfigError(f"{field} is missing; {why}")
