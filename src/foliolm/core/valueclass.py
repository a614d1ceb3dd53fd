"""Values that are made by the hundred thousand: as cheap to make as Python has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def valueclass(cls: type[T]) -> type[T]:
    """A dataclass that nobody changes once it is made: with slots, compared and hashed by its fields.

    The type checker holds everybody to that. Nothing does at run time, because a frozen dataclass takes three times as
    long to make, and a step makes several.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
