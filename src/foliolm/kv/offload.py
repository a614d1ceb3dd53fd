"""Evicted prefixes that live on in the host pool, until they are wanted again or their slots are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foliolm.core.plan import BlockSwap
from foliolm.kv.host import HostPool
from foliolm.kv.prefix import HostCopy, Node, PrefixIndex

Offloaded = tuple[Node, HostCopy]
"""A node and the copy that a step makes of it; the node may have lost it, or have another, before the step is done."""

MOST_LIVES = 1024
"""Copies whose fate the measured reuse remembers, before older ones count half."""
PRIOR_LIVES, PRIOR_HITS = 16, 8
"""What reuse is taken to be before any is measured: every second block is wanted once."""


@dataclass(slots=True)
class Reuse:
    """How often a block that moved to the host is wanted again, as far as that has come out.

    Attributes:
        lives: copies that were wanted at least once, or went without.
        hits: how often they were wanted.
    """

    lives: float = PRIOR_LIVES
    hits: float = PRIOR_HITS

    @property
    def rate(self) -> float:
        """Hits to be expected of one copy."""
        return self.hits / self.lives

    def wanted(self, copy: HostCopy) -> None:
        """A copy is read."""
        copy.hits += 1
        self.hits += 1
        if copy.hits == 1:
            self._lived()

    def gone(self, copy: HostCopy) -> None:
        """A copy's slot was taken for something else."""
        if not copy.hits:
            self._lived()

    def _lived(self) -> None:
        self.lives += 1
        if self.lives > MOST_LIVES:
            self.lives, self.hits = self.lives / 2, self.hits / 2


class HostPrefixes:
    """Copies of prefix blocks in host slots, longest unused first to go, the tail of a prefix before its head.

    Swapped requests come first: their slots are taken from here (``reclaim``), never the other way round. A copy can be
    read once the step that makes it is committed.

    Args:
        pool: whose slots.
        index: the tree that the nodes are in.
        wanted: whether a node that is evicted shall be copied.
    """

    def __init__(self, pool: HostPool, index: PrefixIndex, wanted: Callable[[Node], bool]) -> None:
        self.pool = pool
        self.reuse = Reuse()
        self.kept_blocks = 0  # evicted and kept so far
        self.moved_blocks = 0  # copied for that
        self._index = index
        self._wanted = wanted
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by slot
        # By slot: what the plan in the making copies, and from where. Until it is sealed a copy can be called off.
        self._unsealed: dict[int, tuple[Node, HostCopy, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """Slots that hold a prefix block."""
        return len(self._nodes)

    def take(self, node: Node) -> bool:
        """A node is evicted from the device: True if it stays in the tree, with its content here.

        The next plan makes the copy, before anything else; so the block may be handed out at once.
        """
        if node.copy is not None:
            self._nodes.move_to_end(node.copy.slot)
            self.kept_blocks += 1
            return True
        if not self._wanted(node):
            return False
        self.reclaim(1)
        if not self.pool.num_free:
            return False
        (slot,) = self.pool.allocate(1)
        node.copy = HostCopy(slot)
        self._nodes[slot] = node
        self._unsealed[slot] = (node, node.copy, node.blocks)
        self.kept_blocks += 1
        return True

    def read(self, nodes: Sequence[Node]) -> list[int]:
        """The plan in the making copies these nodes to the device; returns their slots, which stay."""
        slots = [node.copy.slot for node in nodes if node.copy is not None]
        assert len(slots) == len(nodes)
        self.pool.read(slots)
        for node in reversed(nodes):
            assert node.copy is not None
            self._nodes.move_to_end(node.copy.slot)
            self.reuse.wanted(node.copy)
        return slots

    def room(self, wanted: int) -> int:
        """Slots that ``reclaim(wanted)`` could leave free, counted no further than ``wanted``."""
        free = self.pool.num_free
        if free >= wanted:
            return free
        for slot in self._nodes:
            if free >= wanted or not self._is_idle(slot):
                break
            free += 1
        return free

    def reclaim(self, wanted: int) -> None:
        """Give up copies, longest unused first, until ``wanted`` slots are free or none can be."""
        while self.pool.num_free < wanted and self._nodes:
            slot, node = next(iter(self._nodes.items()))
            if not self._is_idle(slot):
                return
            if node.blocks:
                self._lose(node)
            else:
                self.forget(self._index.remove(node))

    def _is_idle(self, slot: int) -> bool:
        """Whether the plan in the making does not need a slot. Those that it reads were moved to the end."""
        return slot in self._unsealed or not self.pool.is_touched(slot)

    def forget(self, nodes: Iterable[Node], is_evidence: bool = True) -> None:
        """Nodes have left the tree; what is here of them is of no use.

        Args:
            nodes: that left.
            is_evidence: they had to make room, which says something of how often such blocks are wanted again.
        """
        for node in nodes:
            if node.copy is not None:
                self._lose(node, is_evidence)

    def _lose(self, node: Node, is_evidence: bool = True) -> None:
        copy = node.copy
        assert copy is not None
        node.copy = None
        del self._nodes[copy.slot]
        if self._unsealed.pop(copy.slot, None) is not None:
            self.pool.cancel(copy.slot)
            self.kept_blocks -= 1
            return
        self.pool.release([copy.slot])
        if is_evidence:
            self.reuse.gone(copy)

    # --- what steps do

    @property
    def num_moving(self) -> int:
        """Blocks that the plan in the making copies here."""
        return len(self._unsealed)

    def seal(self) -> tuple[list[BlockSwap], list[Offloaded]]:
        """The plan in the making is complete: the copies that it makes, and of what."""
        moves = [
            BlockSwap(group, block, slot)
            for slot, (_, _, blocks) in self._unsealed.items()
            for group, block in enumerate(blocks)
        ]
        offloaded = [(node, copy) for node, copy, _ in self._unsealed.values()]
        self._unsealed = {}
        self.moved_blocks += len(offloaded)
        return moves, offloaded

    def written(self, offloaded: Iterable[Offloaded]) -> None:
        """The step that made these copies is committed: they can be found."""
        for node, copy in offloaded:
            copy.is_written = True
            if node.copy is copy:
                self._index.generation += 1

    def failed(self, offloaded: Iterable[Offloaded]) -> None:
        """The step that was to make these copies raised: nothing may be relied upon."""
        for node, copy in offloaded:
            if node.copy is not copy:
                continue
            if node.blocks:
                self._lose(node, is_evidence=False)
            else:
                self.forget(self._index.remove(node), is_evidence=False)

    # --- looking

    def slots(self) -> list[int]:
        """Every slot that holds a prefix block, longest unused first."""
        return list(self._nodes)

    def problems(self) -> list[str]:
        """What is wrong with these books, a sentence each."""
        found = []
        for slot, node in self._nodes.items():
            if node.copy is None or node.copy.slot != slot:
                found.append(f"host slot {slot} is said to hold a block that has no copy there")
        reached = self._index.num_copies()
        if reached != len(self._nodes):
            found.append(f"{reached} nodes of the tree have copies on the host, {len(self._nodes)} are listed")
        return found
