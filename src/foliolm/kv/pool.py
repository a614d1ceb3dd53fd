"""Physical blocks: who may use which, and when a freed one may be used again."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

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

    Every call is O(blocks it moves).

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
        # handed out first.
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept = bytearray(num_blocks)
        self._states = bytearray([BlockState.EMPTY]) * num_blocks
        self._states[NULL_BLOCK] = BlockState.USED
        self.num_shared = 0  # blocks with more than one reference
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

    def state(self, block: int) -> BlockState:
        """Where a block is."""
        return BlockState(self._states[block])

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
        references, states = self.references, self._states
        for block in blocks:
            references[block] = 1
            states[block] = BlockState.USED
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that hold something: used ones, and idle or fenced ones that keep a prefix.

        Raises:
            ValueError: a block is empty, or the null block.
        """
        for block in blocks:
            state = self._states[block]
            if (
                state == BlockState.EMPTY
                or block == NULL_BLOCK
                or (state == BlockState.FENCED and not self._kept[block])
            ):
                raise ValueError(f"block {block} is not in use and cannot be shared")
            if state == BlockState.IDLE:
                del self._idle[block]
            elif state == BlockState.FENCED:
                del self._fence_of[block]
            self._states[block] = BlockState.USED
            self.references[block] += 1
            self.num_shared += self.references[block] == 2

    def release(self, blocks: list[int], fence: int | None = None) -> int:
        """Drop one reference of each block; those that nobody holds any more become empty, or idle if kept.

        Args:
            blocks: in table order. Idle ones age tail first, so that a prefix outlives what stands behind it.
            fence: id of the newest step in flight that reads them: they wait until ``complete`` names that step or a
                later one. None: at once.

        Returns:
            How many blocks nobody holds any more.

        Raises:
            ValueError: a block is not in use (a double free); nothing was changed.
        """
        references = self.references
        held = list(map(references.__getitem__, blocks))
        if blocks and (min(held) < 1 or NULL_BLOCK in blocks):
            block = next(block for block in blocks if references[block] < 1 or block == NULL_BLOCK)
            raise ValueError(f"block {block} is freed, but nobody holds it")
        if blocks and max(held) == 1:
            unheld = blocks
            for block in blocks:
                references[block] = 0
        else:
            unheld = []
            for block, count in zip(blocks, held, strict=True):
                references[block] = count - 1
                if count == 1:
                    unheld.append(block)
                elif count == 2:
                    self.num_shared -= 1
        if fence is None:
            self._lay_down(unheld)
        elif unheld:
            self._fenced.setdefault(fence, []).extend(unheld)
            for block in unheld:
                self._states[block] = BlockState.FENCED
                self._fence_of[block] = fence
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

    def keep(self, block: int) -> None:
        """A prefix is kept in a block: when nobody holds it any more it becomes idle, not empty."""
        self._kept[block] = 1

    def is_kept(self, block: int) -> bool:
        """True if a prefix is kept in a block."""
        return bool(self._kept[block])

    def drop(self, block: int) -> None:
        """The prefix in a block is of no use any more; an idle one becomes empty."""
        self._kept[block] = 0
        if self._states[block] == BlockState.IDLE:
            del self._idle[block]
            self._states[block] = BlockState.EMPTY
            self._empty.append(block)

    def oldest_idle(self) -> int | None:
        """The idle block that was used longest ago."""
        return next(iter(self._idle), None)

    def _lay_down(self, blocks: list[int]) -> None:
        kept, states = self._kept, self._states
        if not any(map(kept.__getitem__, blocks)):
            for block in blocks:
                states[block] = BlockState.EMPTY
            self._empty.extend(blocks)
            return
        for block in blocks:
            if not kept[block]:
                states[block] = BlockState.EMPTY
                self._empty.append(block)
        for block in reversed(blocks):
            if kept[block]:
                states[block] = BlockState.IDLE
                self._idle[block] = None

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
        used = sum(1 for count in self.references if count > 0) - 1
        shared = sum(count > 1 for count in self.references)
        if shared != self.num_shared:
            found.append(f"{shared} blocks are shared, {self.num_shared} were counted")
        if used + len(unheld) != self.num_usable:
            found.append(f"{used} used + {len(unheld)} free or fenced blocks are not {self.num_usable}")
        for state, blocks in (
            (BlockState.EMPTY, self._empty),
            (BlockState.IDLE, list(self._idle)),
            (BlockState.FENCED, fenced),
        ):
            for block in blocks:
                if self.references[block]:
                    found.append(f"block {block} is free with {self.references[block]} references")
                if self._states[block] != state:
                    found.append(f"block {block} is listed as {state.name}, its state is {self.state(block).name}")
        found.extend(f"block {block} is idle, but keeps nothing" for block in self._idle if not self._kept[block])
        return found
