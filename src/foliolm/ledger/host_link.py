"""The way between a device's memory and the host's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foliolm.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostLink:
    """The way to host memory.

    Attributes:
        bytes_per_s: nominal, one way.
        efficiency: share of it that copies reach. Prior 0.8 (0.75 to 0.9 measured on PCIe).
        copy_s: t_copy, seconds to start one copy. Prior 5 µs, a launch.
        copies_per_block: copies that move one block; None: one a layer, as where each layer keeps a pool of its own.
            (With that, blocks of 16 to 64 tokens make swap and recompute cost about the same, as the PagedAttention
            paper, arXiv 2309.06180, section 7.3, found.) A pool whose blocks span the layers needs 1.

    Raises:
        ConfigError: a number is out of range.
    """

    bytes_per_s: float
    efficiency: float = 0.8
    copy_s: float = 5e-6
    copies_per_block: int | None = None

    def __post_init__(self) -> None:
        for name, low_is_open in (("bytes_per_s", True), ("efficiency", True), ("copy_s", False)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (low_is_open and value == 0):
                raise ConfigError(
                    f"host link: {name} is {value}; it must be finite and {'above' if low_is_open else 'at least'} 0"
                )

    def seconds(self, copies: float, moved_bytes: float) -> float:
        """One way: ``copies · t_copy + bytes / (efficiency · link)``."""
        return copies * self.copy_s + moved_bytes / (self.efficiency * self.bytes_per_s)
