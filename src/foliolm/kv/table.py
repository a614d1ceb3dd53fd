"""A request's block table: logical blocks by token position, to physical blocks."""

from __future__ import annotations


class BlockTable:
    """Blocks of one request, one list a KV group; every group covers the same token positions.

    Attributes:
        groups: physical block ids by group, in order of position.
    """

    __slots__ = ("groups",)

    def __init__(self, groups: tuple[list[int], ...]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        """Logical blocks."""
        return len(self.groups[0])

    def whole(self) -> tuple[tuple[int, ...], ...]:
        """A copy that may be put into a plan."""
        return tuple(tuple(blocks) for blocks in self.groups)
