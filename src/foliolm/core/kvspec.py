"""What a group of layers keeps a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A group of layers that share one block table.

    Attributes:
        name: for people.
        num_layers: layers in the group.
        bytes_per_token: of all its layers together, scales included.
        window: tokens that a layer looks back, or None for all.
    """

    name: str
    num_layers: int
    bytes_per_token: int
    window: int | None = None

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block of ``block_size`` tokens, over all layers of the group."""
        return self.bytes_per_token * block_size
