"""The KV manager: who holds how much of the KV memory, and whether more would fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from foliolm.core.kvspec import KVSpec
from foliolm.kv.pool import BlockPool, BlockState
from foliolm.kv.prefix import Node, PrefixIndex
from foliolm.kv.table import BlockTable


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks of one KV group, by state.

    Attributes:
        total: usable blocks (the null block is not counted).
        used, free, fenced: by state; they sum to ``total``.
        idle: those of the free that keep a prefix.
    """

    total: int
    used: int
    free: int
    fenced: int
    idle: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix of a request's tokens.

    Attributes:
        nodes: its blocks, in order.
        num_tokens: in them.
        num_idle: of its blocks, those that nobody holds: to share them takes room, as new blocks do.
    """

    nodes: tuple[Node, ...] = ()
    num_tokens: int = 0
    num_idle: int = 0


NO_MATCH = PrefixMatch()


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
        self._prefixes = PrefixIndex(block_size)
        self.evicted_blocks = 0

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
    def num_idle(self) -> int:
        """Blocks a group that are free, but keep a prefix."""
        return self._first.num_idle

    @property
    def prefix_generation(self) -> int:
        """Changes whenever a prefix becomes known or is forgotten: a match made before may then be out of date."""
        return self._prefixes.generation

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

    def num_shared(self, request_id: int) -> int:
        """Leading blocks of a request that others hold too and that can be found by their prefix.

        They stay where they are when the request gives way, as long as the others hold them.
        """
        references = self._first.references
        return self._leading(request_id, lambda node, own: references[node.blocks[0]] > own)

    def num_published(self, request_id: int) -> int:
        """Leading blocks of a request that can be found by their prefix, whoever's copy that is."""
        return self._leading(request_id, lambda node, own: True)

    def _leading(self, request_id: int, wanted: Callable[[Node, bool], bool]) -> int:
        table = self._tables.get(request_id)
        if table is None:
            return 0
        count = 0
        for node, block in zip(table.chain, table.groups[0], strict=False):
            if not self._prefixes.holds(node) or not wanted(node, node.blocks[0] == block):
                break
            count += 1
        return count

    def match(self, root: Hashable, tokens: Sequence[int]) -> PrefixMatch:
        """The longest known prefix; at least one token is left to compute, so that there are logits to sample from.

        Args:
            root: adapter and salt: whose prefixes these may be.
            tokens: the request's, from position 0.
        """
        nodes = self._prefixes.match(root, tokens, len(tokens) - 1)
        return self.recounted(PrefixMatch(tuple(nodes), len(nodes) * self.block_size)) if nodes else NO_MATCH

    def recounted(self, match: PrefixMatch) -> PrefixMatch:
        """A match of the current ``prefix_generation``, with the blocks that are idle now."""
        state = self._first.state
        idle = sum(state(node.blocks[0]) is BlockState.IDLE for node in match.nodes)
        return match if idle == match.num_idle else PrefixMatch(match.nodes, match.num_tokens, idle)

    def allocate(
        self, request_id: int, num_tokens: int, match: PrefixMatch = NO_MATCH, root: Hashable | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Give a request that holds nothing the blocks for ``num_tokens``; returns its whole table, by group.

        Args:
            request_id: whose.
            num_tokens: tokens in all, the matched ones included.
            match: made since the last change of ``prefix_generation``; its blocks are shared, not copied.
            root: adapter and salt under which its own blocks may be published; None: they are not.

        Raises:
            ValueError: it holds blocks already, or too few are free; nothing was changed.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id} already holds {self.holds(request_id)} blocks")
        count = self.blocks_for(num_tokens) - len(match.nodes)
        if count + match.num_idle > self.num_free:
            raise ValueError(f"request {request_id} needs {count + match.num_idle} blocks, {self.num_free} are free")
        # The match is held before anything is evicted, or the request would evict its own prefix.
        for group, pool in enumerate(self._pools):
            pool.share(node.blocks[group] for node in match.nodes)
        self._evict_until(count)
        groups = tuple(
            [node.blocks[group] for node in match.nodes] + pool.allocate(count)
            for group, pool in enumerate(self._pools)
        )
        table = BlockTable(groups, root, list(match.nodes))
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
        self._evict_until(1)
        added = []
        for pool, blocks in zip(self._pools, table.groups, strict=True):
            (block,) = pool.allocate(1)
            blocks.append(block)
            added.append((block,))
        return tuple(added)

    def grow_each(self, request_ids: Sequence[int]) -> None:
        """As ``grow`` for each id in turn; one may be there several times.

        Raises:
            ValueError: too few blocks are free; nothing was changed.
            KeyError: one holds nothing.
        """
        count = len(request_ids)
        if count > self.num_free:
            raise ValueError(f"{count} blocks are needed, {self.num_free} are free")
        tables = [self._tables[request_id] for request_id in request_ids]
        self._evict_until(count)
        for group, pool in enumerate(self._pools):
            for table, block in zip(tables, pool.allocate(count), strict=True):
                table.groups[group].append(block)

    def publish(self, request_id: int, tokens: Sequence[int], num_computed: int) -> None:
        """Make the full blocks among a request's computed tokens findable; for one that holds nothing, a no-op.

        Args:
            request_id: whose.
            tokens: its tokens from position 0; blocks beyond them have no identity and are not published.
            num_computed: tokens whose KV is written by steps that have completed.
        """
        table = self._tables.get(request_id)
        if table is None or table.root is None:
            return
        size = self.block_size
        full = min(num_computed, len(tokens)) // size
        chain = table.chain
        if len(chain) >= full:
            return
        # Another's block with the same content may have been evicted since: our own then takes its place.
        while chain and not self._prefixes.holds(chain[-1]):
            chain.pop()
        for index in range(len(chain), full):
            blocks = table.block(index)
            parent = chain[-1] if chain else None
            node = self._prefixes.publish(table.root, parent, tokens[index * size : (index + 1) * size], blocks)
            chain.append(node)
            if node.blocks == blocks:
                for pool, block in zip(self._pools, blocks, strict=True):
                    pool.keep(block)

    def reset_prefixes(self) -> int:
        """Forget every prefix; blocks in use stay with their holders. Returns how many blocks kept one."""
        gone = self._prefixes.clear()
        self._drop(gone)
        return len(gone)

    def _evict_until(self, count: int) -> None:
        """Evict idle blocks, longest unused first, until ``count`` are empty."""
        while self._first.num_empty < count:
            block = self._first.oldest_idle()
            if block is None:
                raise ValueError(f"{count} blocks wanted, {self.num_free} free")
            gone = self._prefixes.forget(block)
            self.evicted_blocks += 1
            self._drop(gone)

    def _drop(self, gone: Sequence[Node]) -> None:
        for node in gone:
            for pool, block in zip(self._pools, node.blocks, strict=True):
                pool.drop(block)

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
            KVUsage(
                total=pool.num_usable,
                used=pool.num_usable - pool.num_free - pool.num_fenced,
                free=pool.num_free,
                fenced=pool.num_fenced,
                idle=pool.num_idle,
            )
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
        if len({(pool.num_empty, pool.num_idle, pool.num_fenced) for pool in self._pools}) > 1:
            found.append("the groups' pools have different room")
        found.extend(self._prefixes.problems())
        if len(self._prefixes) < self.num_idle:
            found.append(f"{self.num_idle} blocks are idle, only {len(self._prefixes)} keep a prefix")
        return found
