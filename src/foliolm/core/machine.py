"""How fast a machine reads its memory and multiplies: what a step's rates are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from foliolm.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The two limits of a roofline (Williams et al., 2009).

    Attributes:
        read_bytes_per_s: memory read bandwidth.
        flops_per_s: operations a second of matrix products in the model's number format, a multiplication and an
            addition counted as two.
        compute: that format, and what multiplies.
        source: where the two come from, for people.
    """

    read_bytes_per_s: float
    flops_per_s: float
    compute: str
    source: str

    def __post_init__(self) -> None:
        for one in fields(self)[:2]:
            value = getattr(self, one.name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"machine limits: {one.name} is {value!r}; it must be a finite number above 0")

    def describe(self) -> str:
        """A line for people."""
        return (
            f"the machine reads {self.read_bytes_per_s / 1e9:.1f} GB/s and multiplies {self.flops_per_s / 1e9:,.0f} "
            f"GFLOP/s ({self.compute}; {self.source})"
        )
