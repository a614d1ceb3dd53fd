"""Which blocks hold which prefixes: a tree of full blocks, each under the block that stands before it.

A node is found by its parent and its tokens, compared in full: two prefixes are never taken for one another, whatever
their hashes. Adapter and salt choose the root, so that nobody meets another's KV. A node that was evicted from the
device may live on with a copy on the host (`offload.py`); the tree is one for both, so that both are found alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class HostCopy:
    """A block's content in the host pool.

    Attributes:
        slot: where.
        is_written: the step that copies it there is committed; before, nobody may read it.
        hits: how often it was copied back.
    """

    slot: int
    is_written: bool = False
    hits: int = 0


@dataclass(slots=True, eq=False)
class Node:
    """A full block whose KV is written.

    Attributes:
        blocks: physical ids, by KV group; empty where it is not on the device.
        key: under which its parent knows it: all its tokens (`block_keys`).
        parent: the node before it; None for a root, which has no block.
        children: by their keys.
        depth: blocks from the root to it, itself included.
        copy: its content on the host; None: it has none there.
    """

    blocks: tuple[int, ...]
    key: Hashable
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)
    depth: int = 0
    copy: HostCopy | None = None


class PrefixIndex:
    """Finds the longest known prefix of a token sequence. Knows nothing of references or of room.

    Whatever stands before a node on the device is on the device too; behind it there may be nodes on the host alone.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Hashable, Node] = {}
        self._of_block: dict[int, Node] = {}
        self.generation = 0

    def __len__(self) -> int:
        """Nodes on the device."""
        return len(self._of_block)

    def __contains__(self, block: int) -> bool:
        """True if a block (of the first KV group) holds a known prefix."""
        return block in self._of_block

    def node(self, block: int) -> Node:
        """The node of a block of the first KV group."""
        return self._of_block[block]

    def match(self, root: Hashable, keys: Sequence[Hashable], known: Sequence[Node] = ()) -> list[Node]:
        """Nodes of the longest prefix that is known on the device, in order.

        Args:
            root: adapter and salt.
            keys: of the blocks that may be matched.
            known: what was found before for the same root and keys: where the last of it is still there, all before it
                is, and the search goes on behind it.
        """
        node: Node | None
        if known and self.holds(known[-1]):
            found, node = list(known), known[-1]
        else:
            found, node = [], self._roots.get(root)
        if node is None:
            return found
        for key in keys[len(found) :] if found else keys:
            node = node.children.get(key)
            if node is None or not node.blocks:
                break
            found.append(node)
        return found

    def match_host(self, root: Hashable, keys: Sequence[Hashable], found: Sequence[Node]) -> list[Node]:
        """Nodes behind the prefix that ``match`` found whose content can be read on the host, in order."""
        node = found[-1] if found else self._roots.get(root)
        more: list[Node] = []
        if node is None:
            return more
        for key in keys[len(found) :]:
            node = node.children.get(key)
            if node is None or node.copy is None or not node.copy.is_written:
                break
            more.append(node)
        return more

    def publish(
        self, root: Hashable, parent: Node | None, keys: Sequence[Hashable], blocks: Sequence[tuple[int, ...]]
    ) -> list[Node]:
        """Make full, written blocks findable; those whose prefix is on the device already stay unknown.

        Args:
            root: adapter and salt.
            parent: node of the block before them, on the device; None for the first.
            keys: theirs, one after another.
            blocks: their physical ids, by KV group.

        Returns:
            The nodes that hold their prefixes now.
        """
        if parent is None:
            parent = self._roots.get(root)
            if parent is None:
                parent = self._roots[root] = Node((), root, None)
        nodes: list[Node] = []
        of_block, depth = self._of_block, parent.depth
        for key, mine in zip(keys, blocks, strict=True):
            depth += 1
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = of_block[mine[0]] = Node(mine, key, parent, {}, depth)
                self.generation += 1
            elif not node.blocks:
                node.blocks = mine
                of_block[mine[0]] = node
                self.generation += 1
            nodes.append(node)
            parent = node
        return nodes

    def firsts(self) -> list[tuple[Hashable, Node]]:
        """(root's key, node) of the first blocks of all prefixes."""
        return [(key, node) for key, root in self._roots.items() for node in root.children.values()]

    def holds(self, node: Node) -> bool:
        """True while a node is in the tree."""
        return bool(node.blocks) and self._of_block.get(node.blocks[0]) is node

    def forget(self, block: int) -> list[Node]:
        """A block (of the first KV group) is evicted: it leaves, and with it all that stand behind it.

        Returns:
            Every node that left, itself first.
        """
        node = self._of_block.get(block)
        return [] if node is None else self.remove(node)

    def forget_tails(self, blocks: Sequence[int]) -> list[tuple[int, ...]]:
        """Blocks (of the first KV group) leave one after another, until one comes behind which others stand.

        Returns:
            The blocks of those that left, by KV group.
        """
        gone: list[tuple[int, ...]] = []
        of_block = self._of_block
        for block in blocks:
            node = of_block[block]
            if node.children:
                break
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            if parent.parent is None and not parent.children:
                del self._roots[parent.key]
            del of_block[block]
            gone.append(node.blocks)
        self.generation += len(gone)
        return gone

    def leave_device(self, node: Node) -> tuple[tuple[int, ...], list[Node]]:
        """A node whose content the host has, or will have, gives up its blocks, and stays in the tree.

        Returns:
            The blocks that it had, and the nodes that left the tree, since they were on the device behind it.
        """
        blocks = node.blocks
        del self._of_block[blocks[0]]
        node.blocks = ()
        self.generation += 1
        stranded = [child for child in node.children.values() if child.blocks]
        return blocks, [gone for child in stranded for gone in self.remove(child)]

    def remove(self, node: Node) -> list[Node]:
        """A node leaves, and with it all that stand behind it.

        Returns:
            Every node that left, itself first.
        """
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]
        gone, open_ = [], [node]
        while open_:
            node = open_.pop()
            gone.append(node)
            if node.blocks:
                del self._of_block[node.blocks[0]]
            open_.extend(node.children.values())
            node.children = {}
        self.generation += 1
        return gone

    def clear(self) -> list[Node]:
        """Forget everything; returns every node that left."""
        gone: list[Node] = []
        open_ = [node for root in self._roots.values() for node in root.children.values()]
        while open_:
            node = open_.pop()
            gone.append(node)
            open_.extend(node.children.values())
            node.children = {}
        self._of_block.clear()
        self._roots.clear()
        self.generation += 1
        return gone

    def num_copies(self) -> int:
        """Nodes that have a copy on the host. O(nodes)."""
        count, open_ = 0, list(self._roots.values())
        while open_:
            node = open_.pop()
            count += node.copy is not None
            open_.extend(node.children.values())
        return count

    def problems(self) -> list[str]:
        """What is wrong with the tree, a sentence each."""
        reached: dict[int, Node] = {}
        open_ = list(self._roots.values())
        found = [f"root {root.key!r} is empty" for root in open_ if not root.children]
        while open_:
            node = open_.pop()
            if node.blocks:
                reached[node.blocks[0]] = node
            for key, child in node.children.items():
                if child.parent is not node or child.key != key or child.depth != node.depth + 1:
                    found.append(f"block {child.blocks} hangs under a block that is not its parent")
                if not child.blocks and child.copy is None:
                    found.append(f"a prefix of {child.depth} blocks is neither on the device nor on the host")
                if child.blocks and not node.blocks and node.parent is not None:
                    found.append(f"block {child.blocks} is on the device, the block before it is not")
                open_.append(child)
        if reached != self._of_block:
            found.append(f"{len(reached)} prefix blocks can be reached, {len(self._of_block)} are known")
        return found
