"""Tables that share blocks until one of their holders writes: forks, and copies on write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foliolm.core.plan import BlockCopy
from foliolm.kv.pool import BlockPool
from foliolm.kv.table import BlockTable


@dataclass(slots=True)
class Reservation:
    """Blocks that are kept free for a family of tables, so that it never lacks one.

    Attributes:
        left: how many a group it may still take; what its tables give back is added.
    """

    left: int


def forked(pools: Sequence[BlockPool], table: BlockTable, num_blocks: int, is_public: bool) -> BlockTable:
    """A table that shares the first ``num_blocks`` logical blocks of another, and its reservation.

    Args:
        pools: one a KV group.
        table: whose blocks; it keeps them too.
        num_blocks: at most as many as it has.
        is_public: what the new table's holder computes may be found by others, as with the old one's.
    """
    groups = tuple(blocks[:num_blocks] for blocks in table.groups)
    for pool, blocks in zip(pools, groups, strict=True):
        pool.share(blocks)
    child = BlockTable(groups, table.root if is_public else None, table.chain[:num_blocks])
    child.reservation = table.reservation
    return child


def is_shared(pools: Sequence[BlockPool], table: BlockTable, index: int) -> bool:
    """True if a logical block must be copied before it is written: somebody else holds it, or may find it."""
    block = table.groups[0][index]
    return pools[0].references(block) > 1 or pools[0].is_kept(block)


def own_block(
    pools: Sequence[BlockPool], table: BlockTable, index: int, fence: int | None = None
) -> tuple[tuple[int, ...], list[BlockCopy]]:
    """Give a table a block of its own in place of a shared one; each pool must have an empty block.

    The old block stays with its other holders, or keeps its prefix, so that it is not handed out before the copy is
    made; ``fence`` is the newest step in flight that reads it.

    Returns:
        The new ids by group, and the copies that fill them.
    """
    fresh, copies = [], []
    for group, (pool, blocks) in enumerate(zip(pools, table.groups, strict=True)):
        (block,) = pool.allocate(1)
        copies.append(BlockCopy(group, blocks[index], block))
        pool.release([blocks[index]], fence)
        blocks[index] = block
        fresh.append(block)
    # What is about to be written there is no longer what the chain says.
    del table.chain[index:]
    return tuple(fresh), copies
