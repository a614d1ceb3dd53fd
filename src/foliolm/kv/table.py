"""A request's block table: logical blocks by token position, to physical blocks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from foliolm.kv.prefix import Node

if TYPE_CHECKING:
    from foliolm.kv.forks import Reservation


class BlockTable:
    """Blocks of one request, one list a KV group; every group covers the same token positions.

    Attributes:
        groups: physical block ids by group, in order of position.
        root: under which its prefixes are known (adapter and salt); None: it shares and publishes nothing.
        chain: for its leading full blocks, the nodes that hold their prefixes: its own blocks, or another's with the
            same content.
        reservation: from which its new blocks come; None: from what is free for everybody.
    """

    __slots__ = ("chain", "groups", "reservation", "root")

    def __init__(self, groups: tuple[list[int], ...], root: Hashable | None, chain: list[Node]) -> None:
        self.groups = groups
        self.root = root
        self.chain = chain
        self.reservation: Reservation | None = None

    def __len__(self) -> int:
        """Logical blocks."""
        return len(self.groups[0])

    def block(self, index: int) -> tuple[int, ...]:
        """Physical ids of a logical block, by group."""
        return tuple(blocks[index] for blocks in self.groups)

    def whole(self) -> tuple[tuple[int, ...], ...]:
        """A copy that may be put into a plan."""
        return tuple(tuple(blocks) for blocks in self.groups)
