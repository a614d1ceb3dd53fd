"""The KV manager: who holds how much of the KV memory, and whether more would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foliolm.core.kvspec import KVSpec
from foliolm.kv.pool import BlockPool
from foliolm.kv.table import BlockTable


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks of one KV group, by state.

    Attributes:
        total: usable blocks (the null block is not counted).
        used, free, fenced: by state; they sum to ``total``.
    """

    total: int
    used: int
    free: int
    fenced: int


class KVManager:
    """Block tables of all requests over one pool a KV group.

    All groups have the same block size and number of blocks, and a request holds equally many in each, so that room is
    one number. Physical ids may differ between groups.

    Args:
        specs: the KV groups; at least one.
        num_blocks: blocks a group, the null block included.
        block_size: tokens a block.
    """

    def __init__(self, specs: Sequence[KVSpec], num_blocks: int, block_size: int) -> None:
        if not specs:
            raise ValueError("a KV manager needs at least one KV group")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.specs = tuple(specs)
        self.block_size = block_size
        self._pools = tuple(BlockPool(num_blocks) for _ in specs)
        self._first = self._pools[0]
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_usable(self) -> int:
        """Blocks a group that can ever be handed out."""
        return self._first.num_usable

    @property
    def num_free(self) -> int:
        """Blocks a group that can be handed out now."""
        return self._first.num_free

    @property
    def num_fenced(self) -> int:
        """Blocks a group that become free when steps in flight complete."""
        return self._first.num_fenced

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - (self.num_free + self.num_fenced) / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """``ceil(L / p)``: blocks a group for L tokens, of which the last wastes at most p − 1 positions."""
        return -(-num_tokens // self.block_size)

    def holds(self, request_id: int) -> int:
        """Logical blocks that a request holds; 0 if it is unknown."""
        table = self._tables.get(request_id)
        return 0 if table is None else len(table)

    def allocate(self, request_id: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Give a request that holds nothing the blocks for ``num_tokens``; returns its whole table, by group.

        Raises:
            ValueError: it holds blocks already, or too few are free; nothing was changed.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id} already holds {self.holds(request_id)} blocks")
        count = self.blocks_for(num_tokens)
        if count > self.num_free:
            raise ValueError(f"request {request_id} needs {count} blocks, {self.num_free} are free")
        table = BlockTable(tuple(pool.allocate(count) for pool in self._pools))
        self._tables[request_id] = table
        return table.whole()

    def grow(self, request_id: int) -> tuple[tuple[int, ...], ...]:
        """Give a request one more logical block; returns the new ids, by group.

        Raises:
            ValueError: none is free; nothing was changed.
            KeyError: it holds nothing.
        """
        table = self._tables[request_id]
        if not self._first.num_free:
            raise ValueError(f"request {request_id} needs a block, none is free")
        added = []
        for pool, blocks in zip(self._pools, table.groups, strict=True):
            (block,) = pool.allocate(1)
            blocks.append(block)
            added.append((block,))
        return tuple(added)

    def release(self, request_id: int, fence: int | None = None) -> int:
        """Take back all that a request holds; for an unknown request, or a second time, a no-op.

        Args:
            request_id: whose blocks.
            fence: id of the newest step in flight that reads them, or None.

        Returns:
            Blocks a group that nobody holds any more.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return 0
        unheld = [pool.release(blocks, fence) for pool, blocks in zip(self._pools, table.groups, strict=True)]
        return unheld[0]

    def complete(self, step_id: int) -> None:
        """A step has completed: what was fenced by it becomes free."""
        for pool in self._pools:
            pool.complete(step_id)

    def table(self, request_id: int) -> tuple[tuple[int, ...], ...]:
        """A request's whole table by group; empty groups if it holds nothing."""
        table = self._tables.get(request_id)
        return tuple(() for _ in self._pools) if table is None else table.whole()

    def group_usage(self) -> tuple[KVUsage, ...]:
        """Blocks by state, a group each."""
        return tuple(
            KVUsage(pool.num_usable, pool.num_usable - pool.num_free - pool.num_fenced, pool.num_free, pool.num_fenced)
            for pool in self._pools
        )

    def problems(self, live: set[int] | None = None) -> list[str]:
        """The invariant check: what is wrong, a sentence each; empty if nothing is.

        Args:
            live: ids of the requests that may hold blocks; None: whoever does.
        """
        found: list[str] = []
        if live is not None:
            found.extend(f"request {rid} holds blocks, but is not live" for rid in self._tables.keys() - live)
        for group, pool in enumerate(self._pools):
            found.extend(f"group {group}: {problem}" for problem in pool.problems())
            held = [0] * pool.num_blocks
            for rid, table in self._tables.items():
                if len(table.groups[group]) != len(table):
                    found.append(f"group {group}: request {rid} holds another number of blocks than in group 0")
                for block in table.groups[group]:
                    held[block] += 1
            found.extend(
                f"group {group}: block {block} has {pool.references[block]} references, tables hold it {count} times"
                for block, count in enumerate(held)
                if block and count != pool.references[block]
            )
        if len({(pool.num_free, pool.num_fenced) for pool in self._pools}) > 1:
            found.append("the groups' pools have different room")
        return found
