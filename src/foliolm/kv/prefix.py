"""Which blocks hold which prefixes: a tree of full blocks, each under the block that stands before it.

A node is found by its parent and its tokens, compared in full: two prefixes are never taken for one another, whatever
their hashes. Adapter and salt choose the root, so that nobody meets another's KV.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]


@dataclass(slots=True, eq=False)
class Node:
    """A full block whose KV is written.

    Attributes:
        blocks: physical ids, by KV group.
        key: under which its parent knows it.
        parent: the node before it; None for a root, which has no block.
        children: by their tokens.
    """

    blocks: tuple[int, ...]
    key: Hashable
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)


class PrefixIndex:
    """Finds the longest known prefix of a token sequence. Knows nothing of references or of room.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Hashable, Node] = {}
        self._of_block: dict[int, Node] = {}
        self.generation = 0

    def __len__(self) -> int:
        """Nodes."""
        return len(self._of_block)

    def __contains__(self, block: int) -> bool:
        """True if a block (of the first KV group) holds a known prefix."""
        return block in self._of_block

    def node(self, block: int) -> Node:
        """The node of a block of the first KV group."""
        return self._of_block[block]

    def match(self, root: Hashable, tokens: Tokens, limit: int) -> list[Node]:
        """Nodes of the longest known prefix, in order.

        Args:
            root: adapter and salt.
            tokens: whose prefix.
            limit: most tokens that may be matched.
        """
        node = self._roots.get(root)
        found: list[Node] = []
        size = self._block_size
        if node is None:
            return found
        for start in range(0, limit - size + 1, size):
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            found.append(node)
        return found

    def publish(self, root: Hashable, parent: Node | None, tokens: Tokens, blocks: tuple[int, ...]) -> Node:
        """Make a full, written block findable, or return the node that holds the same prefix already.

        Args:
            root: adapter and salt.
            parent: node of the block before it; None for the first.
            tokens: the block's own, exactly ``block_size``.
            blocks: its physical ids, by KV group.
        """
        if parent is None:
            parent = self._roots.get(root)
            if parent is None:
                parent = self._roots[root] = Node((), root, None)
        key = tuple(tokens)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(blocks, key, parent)
            self._of_block[blocks[0]] = node
            self.generation += 1
        return node

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
        if node is None:
            return []
        assert node.parent is not None
        del node.parent.children[node.key]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.parent.key]
        gone, open_ = [], [node]
        while open_:
            node = open_.pop()
            gone.append(node)
            del self._of_block[node.blocks[0]]
            open_.extend(node.children.values())
            node.children = {}
        self.generation += 1
        return gone

    def clear(self) -> list[Node]:
        """Forget everything; returns every node that left."""
        gone = list(self._of_block.values())
        for node in gone:
            node.children = {}
        self._of_block.clear()
        self._roots.clear()
        self.generation += 1
        return gone

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
                if child.parent is not node or child.key != key:
                    found.append(f"block {child.blocks} hangs under a block that is not its parent")
                open_.append(child)
        if reached != self._of_block:
            found.append(f"{len(reached)} prefix blocks can be reached, {len(self._of_block)} are known")
        return found
