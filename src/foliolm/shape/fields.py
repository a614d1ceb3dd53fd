"""A mapping read field by field, with errors that name the field, its value and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foliolm.core.errors import ModelError

_MISSING: Any = object()


class Fields:
    """Typed reads from a parsed config.

    Args:
        values: the mapping.
        where: the file it came from, for the errors' text.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(key)

    def error(self, key: str, wanted: str) -> ModelError:
        """An error about ``key``, to be raised by the caller."""
        if key not in self.values:
            return ModelError(f"{self.where} has no {key}; {wanted}")
        value = repr(self.values[key])
        return ModelError(f"{self.where} has {key} {value[:80]}; {wanted}")

    def integer(self, key: str, default: int = _MISSING, least: int = 1) -> int:
        """An integer of at least ``least``; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise self.error(key, f"it must be an integer of at least {least}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"it must be an integer of at least {least}")
        return value

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        """An integer of at least ``least``, or None where it is absent or null."""
        return None if self.values.get(key) is None else self.integer(key, least=least)

    def number(self, key: str, default: float = _MISSING) -> float:
        """A finite number above 0; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise self.error(key, "it must be a number above 0")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "it must be a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where it is absent or null."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def text(self, key: str) -> str:
        """A string of at least one character."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "it must be a string")
        return value
