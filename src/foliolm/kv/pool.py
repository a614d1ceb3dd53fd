"""Physical blocks: who may use which, and when a freed one may be used again."""

from __future__ import annotations

NULL_BLOCK = 0
"""Never handed out: the padding rows of a bucketed batch write here."""


class BlockPool:
    """Fixed number of equal blocks with reference counts and fences.

    A block is in exactly one state: *used* (reference count at least 1), *fenced* (count 0, but a step in flight still
    reads it), or *free*. Every call is O(blocks it moves).

    Args:
        num_blocks: blocks in all, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.references[NULL_BLOCK] = 1
        # A stack: what was freed last is still warm. Blocks are pushed head first, so that of one table the tail is
        # handed out first: should the rest ever be found again by its prefix, it is the head that is of use.
        self._free = list(range(num_blocks - 1, 0, -1))
        self._fenced: dict[int, list[int]] = {}
        self._num_fenced = 0

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when steps in flight complete."""
        return self._num_fenced

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, each with one reference.

        Raises:
            ValueError: fewer are free; nothing was handed out. Callers look at ``num_free`` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        references = self.references
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a reference to blocks in use."""
        for block in blocks:
            if self.references[block] < 1 or block == NULL_BLOCK:
                raise ValueError(f"block {block} is not in use and cannot be shared")
            self.references[block] += 1

    def release(self, blocks: list[int], fence: int | None = None) -> int:
        """Drop one reference of each block; those that nobody holds any more become free.

        Args:
            blocks: in table order.
            fence: id of the newest step in flight that reads them: they become free when ``complete`` names that step
                or a later one. None: at once.

        Returns:
            How many blocks nobody holds any more.

        Raises:
            ValueError: a block is not in use (a double free); nothing was changed.
        """
        references = self.references
        for block in blocks:
            if references[block] < 1 or block == NULL_BLOCK:
                raise ValueError(f"block {block} is freed, but nobody holds it")
        unheld = []
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                unheld.append(block)
        if fence is None:
            self._free.extend(unheld)
        elif unheld:
            self._fenced.setdefault(fence, []).extend(unheld)
            self._num_fenced += len(unheld)
        return len(unheld)

    def complete(self, step_id: int) -> None:
        """A step has completed: blocks fenced by it, or by an earlier one, become free."""
        if not self._fenced:
            return
        for fence in sorted(fence for fence in self._fenced if fence <= step_id):
            blocks = self._fenced.pop(fence)
            self._num_fenced -= len(blocks)
            self._free.extend(blocks)

    def problems(self) -> list[str]:
        """What is wrong with the pool's books: a sentence each; empty if nothing is."""
        found = []
        fenced = [block for blocks in self._fenced.values() for block in blocks]
        idle = self._free + fenced
        if len(fenced) != self._num_fenced:
            found.append(f"{len(fenced)} blocks are fenced, {self._num_fenced} were counted")
        if len(set(idle)) != len(idle):
            found.append("a block is free twice")
        if NULL_BLOCK in idle:
            found.append("the null block is free")
        used = sum(1 for count in self.references if count > 0) - 1
        if used + len(idle) != self.num_usable:
            found.append(f"{used} used + {len(idle)} free or fenced blocks are not {self.num_usable}")
        found.extend(
            f"block {block} is free with {self.references[block]} references"
            for block in idle
            if self.references[block]
        )
        return found
