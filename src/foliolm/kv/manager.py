"""The KV manager: who holds how much of the KV memory, and whether more would fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import BlockCopy, BlockSwap
from foliolm.core.valueclass import valueclass
from foliolm.kv.block_keys import BlockKeys
from foliolm.kv.forks import Reservation, forked, is_shared, own_block
from foliolm.kv.host import HostPool
from foliolm.kv.offload import HostPrefixes
from foliolm.kv.pool import BlockPool
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


@valueclass
class PrefixMatch:
    """The longest known prefix of a request's tokens.

    Attributes:
        nodes: its blocks on the device, in order.
        num_tokens: in them.
        num_idle: of its blocks, those that nobody holds: to share them takes room, as new blocks do.
        on_host: the blocks behind them whose content the host has: they can be copied into new blocks.
    """

    nodes: tuple[Node, ...] = ()
    num_tokens: int = 0
    num_idle: int = 0
    on_host: tuple[Node, ...] = ()


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
        self._reservations: dict[int, Reservation] = {}
        self._num_reserved = 0
        self.host: HostPrefixes | None = None
        self.evicted_blocks = 0
        self.num_held = 0  # logical blocks of all tables: a shared one counts for each of its holders

    @property
    def num_usable(self) -> int:
        """Blocks a group that can ever be handed out."""
        return self._first.num_usable

    @property
    def num_free(self) -> int:
        """Blocks a group that can be handed out to anybody now."""
        return self._first.num_free - self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Free blocks a group that are kept for those who have reserved them."""
        return self._num_reserved

    @property
    def num_shared_blocks(self) -> int:
        """Blocks a group that more than one request holds."""
        return self._first.num_shared

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
    def offloaded_blocks(self) -> int:
        """Of the blocks that were evicted so far, those whose content the host kept."""
        return 0 if self.host is None else self.host.kept_blocks

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
        return self._leading(request_id, lambda node, own: references(node.blocks[0]) > own)

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

    def match(
        self,
        root: Hashable,
        tokens: Sequence[int] | BlockKeys,
        num_tokens: int | None = None,
        known: PrefixMatch | None = None,
    ) -> PrefixMatch:
        """The longest known prefix; at least one token is left to compute, so that there are logits to sample from.

        Args:
            root: adapter and salt: whose prefixes these may be.
            tokens: the request's, from position 0, or their keys.
            num_tokens: how many of them the request has; None: all.
            known: an earlier match of the same tokens, where there is one: it need not be found again.
        """
        count = len(tokens) if num_tokens is None else num_tokens
        keys = self._keys(tokens, 0, (count - 1) // self.block_size)
        nodes = self._prefixes.match(root, keys, () if known is None else known.nodes)
        on_host = self._prefixes.match_host(root, keys, nodes) if self.host else ()
        if not nodes and not on_host:
            return NO_MATCH
        return self.recounted(PrefixMatch(tuple(nodes), len(nodes) * self.block_size, 0, tuple(on_host)))

    def recounted(self, match: PrefixMatch) -> PrefixMatch:
        """A match of the current ``prefix_generation``, with the blocks that are idle now."""
        idle = self._first.count_idle(node.blocks[0] for node in match.nodes)
        return match if idle == match.num_idle else replace(match, num_idle=idle)

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
        count = self._check_room(request_id, num_tokens, match)
        # The match is held before anything is evicted, or the request would evict its own prefix.
        for group, pool in enumerate(self._pools):
            pool.share(node.blocks[group] for node in match.nodes)
        self._evict_until(count)
        groups = tuple(
            [node.blocks[group] for node in match.nodes] + pool.allocate(count)
            for group, pool in enumerate(self._pools)
        )
        table = BlockTable(groups, root, list(match.nodes))
        self.num_held += len(table)
        self._tables[request_id] = table
        return table.whole()

    def _check_room(self, request_id: int, num_tokens: int, match: PrefixMatch) -> int:
        """New blocks that ``allocate`` would take."""
        if request_id in self._tables:
            raise ValueError(f"request {request_id} already holds {self.holds(request_id)} blocks")
        count = self.blocks_for(num_tokens) - len(match.nodes)
        if count + match.num_idle > self.num_free:
            raise ValueError(f"request {request_id} needs {count + match.num_idle} blocks, {self.num_free} are free")
        return count

    def grow(self, request_id: int) -> tuple[tuple[int, ...], ...]:
        """Give a request one more logical block; returns the new ids, by group.

        Raises:
            ValueError: none is free; nothing was changed.
            KeyError: it holds nothing.
        """
        table = self._tables[request_id]
        self._make_one_empty(request_id, table)
        self.num_held += 1
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
        self.num_held += count
        self._evict_until(count)
        for group, pool in enumerate(self._pools):
            for table, block in zip(tables, pool.allocate(count), strict=True):
                table.groups[group].append(block)

    def _make_one_empty(self, request_id: int, table: BlockTable) -> None:
        """An empty block for a table, out of its reservation if it has one."""
        reservation = table.reservation
        if reservation is not None and reservation.left > 0:
            reservation.left -= 1
            self._num_reserved -= 1
        elif self.num_free < 1:
            raise ValueError(f"request {request_id} needs a block, none is free")
        self._evict_until(1)

    def reserve(self, request_id: int, count: int) -> None:
        """Keep free blocks for a request that holds some already, and for its forks, until it is released.

        Raises:
            ValueError: too few are free, or it has reserved before; nothing was changed.
            KeyError: it holds nothing.
        """
        table = self._tables[request_id]
        if table.reservation is not None:
            raise ValueError(f"request {request_id} has reserved blocks before")
        if count > self.num_free:
            raise ValueError(f"request {request_id} reserves {count} blocks, {self.num_free} are free")
        table.reservation = self._reservations[request_id] = Reservation(count)
        self._num_reserved += count

    def fork(self, request_id: int, parent: int, num_tokens: int, is_public: bool = True) -> None:
        """Give a request that holds nothing the blocks of another one's first tokens; both hold them then.

        Args:
            request_id: whose table is made.
            parent: whose blocks it shares, the last one too if it is not full.
            num_tokens: tokens from position 0 on that it has in common with the parent.
            is_public: what it computes may be published, as what the parent computes.

        Raises:
            ValueError: it holds blocks already, or the parent has fewer; nothing was changed.
            KeyError: the parent holds nothing.
        """
        table, count = self._tables[parent], self.blocks_for(num_tokens)
        if request_id in self._tables:
            raise ValueError(f"request {request_id} already holds {self.holds(request_id)} blocks")
        if count > len(table):
            raise ValueError(f"request {parent} has {len(table)} blocks; {num_tokens} tokens are in {count}")
        self._tables[request_id] = forked(self._pools, table, count, is_public)
        self.num_held += count

    def refork(self, request_id: int, parent: int, num_tokens: int) -> None:
        """Give up a request's blocks for those of another of its family: what was its own is kept for the family.

        Raises:
            ValueError: the parent has fewer blocks; nothing was changed.
            KeyError: one of them holds nothing.
        """
        old, source = self._tables[request_id], self._tables[parent]
        count = self.blocks_for(num_tokens)
        if count > len(source):
            raise ValueError(f"request {parent} has {len(source)} blocks; {num_tokens} tokens are in {count}")
        self._tables[request_id] = forked(self._pools, source, count, source.root is not None)
        self.num_held += count - len(old)
        unheld = [pool.release(blocks) for pool, blocks in zip(self._pools, old.groups, strict=True)]
        if old.reservation is not None:
            old.reservation.left += unheld[0]
            self._num_reserved += unheld[0]

    def keep_private(self, request_id: int) -> None:
        """What a request computes from now on, and its forks, is not published."""
        self._tables[request_id].root = None

    def is_shared(self, request_id: int, position: int) -> bool:
        """True if a request must not write at a position before it has a block of its own there."""
        return is_shared(self._pools, self._tables[request_id], position // self.block_size)

    def holder_counts(self) -> list[int]:
        """By used block of the first KV group: how many requests hold it."""
        return self._first.reference_counts()

    def prefix_roots(self) -> list[tuple[Hashable, Node]]:
        """(adapter and salt, first block) of every known prefix."""
        return self._prefixes.firsts()

    def holders(self, block: int) -> int:
        """How many requests hold a block of the first KV group."""
        return self._first.references(block)

    def own(self, request_id: int, position: int, fence: int | None = None) -> tuple[tuple[int, ...], list[BlockCopy]]:
        """Give a request a block of its own in place of the shared one that holds a position.

        Args:
            request_id: whose table.
            position: of the token that will be written.
            fence: id of the newest step in flight that reads the block for this request, or None.

        Returns:
            The new block's ids by group, and the copies to be made before it is written.

        Raises:
            ValueError: none is free; nothing was changed.
        """
        table = self._tables[request_id]
        self._make_one_empty(request_id, table)
        return own_block(self._pools, table, position // self.block_size, fence)

    def _keys(self, tokens: Sequence[int] | BlockKeys, first: int, end: int) -> Sequence[Hashable]:
        """Keys of some blocks, by logical number."""
        keys = tokens if isinstance(tokens, BlockKeys) else BlockKeys(tokens, self.block_size)
        return keys.first(end)[first:end]

    def publish(self, request_id: int, tokens: Sequence[int] | BlockKeys, num_computed: int) -> None:
        """Make the full blocks among a request's computed tokens findable; for one that holds nothing, a no-op.

        Args:
            request_id: whose.
            tokens: its tokens from position 0, or their keys; blocks beyond them have no identity and are not
                published.
            num_computed: tokens whose KV is written by steps that have completed.
        """
        table = self._tables.get(request_id)
        if table is None or table.root is None:
            return
        full = min(num_computed, len(tokens)) // self.block_size
        chain = table.chain
        if len(chain) >= full:
            return
        # Another's block with the same content may have been evicted since: our own then takes its place.
        while chain and not self._prefixes.holds(chain[-1]):
            chain.pop()
        first = len(chain)
        blocks = list(zip(*(group[first:full] for group in table.groups), strict=True))
        keys = self._keys(tokens, first, full)
        nodes = self._prefixes.publish(table.root, chain[-1] if chain else None, keys, blocks)
        chain += nodes
        kept = [mine for node, mine in zip(nodes, blocks, strict=True) if node.blocks == mine]
        for pool, of_group in zip(self._pools, zip(*kept, strict=True), strict=bool(kept)):
            pool.keep(of_group)

    def offload_to(self, pool: HostPool, wanted: Callable[[Node], bool]) -> HostPrefixes:
        """From now on idle blocks that are evicted may live on in host slots.

        Args:
            pool: whose slots.
            wanted: says of a node that is evicted whether it shall be copied.
        """
        self.host = HostPrefixes(pool, self._prefixes, wanted)
        return self.host

    def allocate_from_host(
        self, request_id: int, num_tokens: int, match: PrefixMatch, root: Hashable | None
    ) -> tuple[tuple[tuple[int, ...], ...], list[BlockSwap]]:
        """As ``allocate``, and the copies that fill the blocks behind the match with what the host has of it.

        Raises:
            ValueError: as ``allocate``; nothing was changed.
        """
        assert self.host is not None
        # The slots are spoken for before anything is evicted, or the request would push out its own prefix.
        self._check_room(request_id, num_tokens, match)
        slots = self.host.read(match.on_host)
        table = self.allocate(request_id, num_tokens, match, root)
        first = len(match.nodes)
        return table, [
            BlockSwap(group, blocks[first + index], slot)
            for group, blocks in enumerate(table)
            for index, slot in enumerate(slots)
        ]

    def reset_prefixes(self) -> int:
        """Forget every prefix; blocks in use stay with their holders. Returns how many blocks kept one."""
        gone = self._prefixes.clear()
        self._drop(gone, is_evidence=False)
        return len(gone)

    def _evict_until(self, count: int) -> None:
        """Evict idle blocks, longest unused first, until ``count`` are empty."""
        while (missing := count - self._first.num_empty) > 0:
            if self.host is None and self._evict_tails(missing):
                continue
            block = self._first.oldest_idle()
            if block is None:
                raise ValueError(f"{count} blocks wanted, {self.num_free} free")
            self.evicted_blocks += 1
            if self.host is not None and self.host.take(node := self._prefixes.node(block)):
                blocks, gone = self._prefixes.leave_device(node)
                self._drop_blocks(blocks)
            else:
                gone = self._prefixes.forget(block)
            self._drop(gone)

    def _evict_tails(self, most: int) -> int:
        """Evict the oldest idle blocks, up to so many, until one comes behind which others stand; returns how many."""
        gone = self._prefixes.forget_tails(self._first.idle_blocks(most))
        for pool, blocks in zip(self._pools, zip(*gone, strict=True), strict=bool(gone)):
            pool.drop_idle(blocks)
        self.evicted_blocks += len(gone)
        return len(gone)

    def _drop(self, gone: Sequence[Node], is_evidence: bool = True) -> None:
        for node in gone:
            if node.blocks:
                self._drop_blocks(node.blocks)
        if self.host is not None:
            self.host.forget(gone, is_evidence)

    def _drop_blocks(self, blocks: tuple[int, ...]) -> None:
        for pool, block in zip(self._pools, blocks, strict=True):
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
        self.num_held -= len(table)
        unheld = [pool.release(blocks, fence) for pool, blocks in zip(self._pools, table.groups, strict=True)]
        if table.reservation is not None:
            self._give_back(request_id, table.reservation, unheld[0])
        return unheld[0]

    def _give_back(self, request_id: int, reservation: Reservation, unheld: int) -> None:
        """A member of a family with a reservation is released: its blocks are kept for the others, while there are."""
        if request_id in self._reservations:
            del self._reservations[request_id]
            self._num_reserved -= reservation.left
            for table in self._tables.values():
                if table.reservation is reservation:
                    table.reservation = None
        else:
            reservation.left += unheld
            self._num_reserved += unheld

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
                f"group {group}: block {block} has {pool.references(block)} references, tables hold it {count} times"
                for block, count in enumerate(held)
                if block and count != pool.references(block)
            )
        if len({(pool.num_empty, pool.num_idle, pool.num_fenced) for pool in self._pools}) > 1:
            found.append("the groups' pools have different room")
        if self.num_held != sum(map(len, self._tables.values())):
            found.append(f"tables have {sum(map(len, self._tables.values()))} blocks, {self.num_held} were counted")
        reserved = sum(reservation.left for reservation in self._reservations.values())
        if reserved != self._num_reserved or not 0 <= reserved <= self._first.num_free:
            found.append(f"{reserved} blocks are reserved, {self._num_reserved} counted, {self._first.num_free} free")
        found.extend(self._prefixes.problems())
        if self.host is not None:
            found.extend(self.host.problems())
        if len(self._prefixes) < self.num_idle:
            found.append(f"{self.num_idle} blocks are idle, only {len(self._prefixes)} keep a prefix")
        return found
