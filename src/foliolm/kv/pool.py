"""Physical blocks: who may use which, and when a freed one may be used again."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from foliolm.kv.idle import IdleBlocks

NULL_BLOCK = 0
"""Never handed out: the padding rows of a bucketed batch write here."""


class BlockState(enum.IntEnum):
    """EMPTY: can be handed out. IDLE: nobody holds it, but a prefix is kept in it; it can be evicted.

    FENCED: nobody holds it, but a step in flight still reads it. USED: somebody holds it.
    """

    EMPTY = 0
    IDLE = 1
    FENCED = 2
    USED = 3


class BlockPool:
    """Fixed number of equal blocks with reference counts, fences, and idle blocks that keep a prefix.

    Every call is O(blocks it moves). A block's state follows from which of the books it stands in, and almost every
    block has one holder: so the books are sets, which take and give whole tables at once, and only the references
    beyond the first are counted.

    Args:
        num_blocks: blocks in all, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        # A stack: what was freed last is still warm. Blocks are pushed head first, so that of one table the tail is
        # handed out first.
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._idle = IdleBlocks()
        self._used: set[int] = set()
        self._more: dict[int, int] = {}  # of shared blocks: references beyond the first
        self._kept: set[int] = set()
        self._fenced: dict[int, list[int]] = {}
        self._fence_of: dict[int, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_empty(self) -> int:
        """Blocks that can be handed out at once."""
        return len(self._empty)

    @property
    def num_idle(self) -> int:
        """Blocks that can be handed out once they are evicted."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and no step reads: the empty and the idle."""
        return len(self._empty) + len(self._idle)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when steps in flight complete."""
        return len(self._fence_of)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference."""
        return len(self._more)

    def references(self, block: int) -> int:
        """How often a block is held; the null block once, by nobody in particular."""
        return 1 + self._more.get(block, 0) if block in self._used or block == NULL_BLOCK else 0

    def reference_counts(self) -> list[int]:
        """Of every used block, in order of their ids."""
        more = self._more
        return [1 + more.get(block, 0) for block in sorted(self._used)]

    def state(self, block: int) -> BlockState:
        """Where a block is."""
        if block in self._used or block == NULL_BLOCK:
            return BlockState.USED
        if block in self._fence_of:
            return BlockState.FENCED
        return BlockState.IDLE if block in self._idle else BlockState.EMPTY

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of some blocks are idle."""
        return sum(map(self._idle.__contains__, blocks))

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` empty blocks, each with one reference.

        Raises:
            ValueError: fewer are empty; nothing was handed out. Callers look at ``num_empty`` first.
        """
        if count > len(self._empty):
            raise ValueError(f"{count} blocks wanted, {len(self._empty)} free")
        if count == 0:
            return []
        blocks = self._empty[: -count - 1 : -1]
        del self._empty[-count:]
        self._used.update(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that hold something: used ones, and idle or fenced ones that keep a prefix.

        Raises:
            ValueError: a block is empty, or the null block.
        """
        used, more, idle = self._used, self._more, self._idle
        for block in blocks:
            if block in used:
                more[block] = more.get(block, 0) + 1
                continue
            if block in idle:
                idle.remove(block)
            elif block in self._fence_of and block in self._kept:
                del self._fence_of[block]
            else:
                raise ValueError(f"block {block} is not in use and cannot be shared")
            used.add(block)

    def release(self, blocks: list[int], fence: int | None = None) -> int:
        """Drop one reference of each block; those that nobody holds any more become empty, or idle if kept.

        Args:
            blocks: in table order, each once. Idle ones age tail first, so that a prefix outlives what stands behind
                it.
            fence: id of the newest step in flight that reads them: they wait until ``complete`` names that step or a
                later one. None: at once.

        Returns:
            How many blocks nobody holds any more.

        Raises:
            ValueError: a block is not in use (a double free); nothing was changed.
        """
        used, more = self._used, self._more
        if not used.issuperset(blocks):
            block = next(block for block in blocks if block not in used)
            raise ValueError(f"block {block} is freed, but nobody holds it")
        unheld = blocks
        if more and not more.keys().isdisjoint(blocks):
            unheld = []
            for block in blocks:
                left = more.get(block)
                if left is None:
                    unheld.append(block)
                elif left == 1:
                    del more[block]
                else:
                    more[block] = left - 1
        used.difference_update(unheld)
        if fence is None:
            self._lay_down(unheld)
        elif unheld:
            self._fenced.setdefault(fence, []).extend(unheld)
            self._fence_of.update(dict.fromkeys(unheld, fence))
        return len(unheld)

    def complete(self, step_id: int) -> None:
        """A step has completed: blocks fenced by it, or by an earlier one, become empty or idle."""
        if not self._fenced:
            return
        for fence in sorted(fence for fence in self._fenced if fence <= step_id):
            # One that was shared meanwhile is no longer fenced, or by a later step.
            blocks = [block for block in self._fenced.pop(fence) if self._fence_of.get(block) == fence]
            for block in blocks:
                del self._fence_of[block]
            self._lay_down(blocks)

    def keep(self, blocks: Iterable[int]) -> None:
        """Prefixes are kept in some blocks: when nobody holds one any more it becomes idle, not empty."""
        self._kept.update(blocks)

    def is_kept(self, block: int) -> bool:
        """True if a prefix is kept in a block."""
        return block in self._kept

    def drop(self, block: int) -> None:
        """The prefix in a block is of no use any more; an idle one becomes empty."""
        self._kept.discard(block)
        if block in self._idle:
            self._idle.remove(block)
            self._empty.append(block)

    def drop_idle(self, blocks: Sequence[int]) -> None:
        """As ``drop`` for idle blocks, in their order."""
        self._kept.difference_update(blocks)
        idle = self._idle
        for block in blocks:
            idle.remove(block)
        self._empty.extend(blocks)

    def idle_blocks(self, most: int) -> list[int]:
        """Up to so many idle blocks, those that were used longest ago first."""
        return self._idle.oldest(most)

    def oldest_idle(self) -> int | None:
        """The idle block that was used longest ago."""
        return next(iter(self._idle.oldest(1)), None)

    def _lay_down(self, blocks: list[int]) -> None:
        kept = self._kept
        if kept.isdisjoint(blocks):
            self._empty.extend(blocks)
            return
        self._empty.extend([block for block in blocks if block not in kept])
        self._idle.add([block for block in blocks if block in kept])

    def problems(self) -> list[str]:
        """What is wrong with the pool's books: a sentence each; empty if nothing is."""
        found = []
        fenced = list(self._fence_of)
        listed = {(block, fence) for fence, blocks in self._fenced.items() for block in blocks}
        if not listed.issuperset(self._fence_of.items()):
            found.append("a fenced block waits for no step")
        unheld = self._empty + list(self._idle) + fenced
        if len(set(unheld)) != len(unheld):
            found.append("a block is free twice")
        if NULL_BLOCK in unheld:
            found.append("the null block is free")
        used = len(self._used)
        if used + len(unheld) != self.num_usable:
            found.append(f"{used} used + {len(unheld)} free or fenced blocks are not {self.num_usable}")
        for state, blocks in (
            (BlockState.EMPTY, self._empty),
            (BlockState.IDLE, list(self._idle)),
            (BlockState.FENCED, fenced),
        ):
            for block in blocks:
                if block in self._used:
                    found.append(f"block {block} is free with {self.references(block)} references")
                elif self.state(block) is not state and block != NULL_BLOCK:
                    found.append(f"block {block} is listed as {state.name}, its state is {self.state(block).name}")
        if not self._more.keys() <= self._used or min(self._more.values(), default=1) < 1:
            found.append("a block is counted as shared, and is not")
        found.extend(f"block {block} is idle, but keeps nothing" for block in self._idle if block not in self._kept)
        return found
