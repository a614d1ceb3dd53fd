"""Swapping: a request's KV moves to the host while it gives way, and comes back when there is room."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from foliolm.core.plan import BlockSwap
from foliolm.kv.host import HostPool
from foliolm.kv.manager import KVManager, PrefixMatch


@dataclass(frozen=True, slots=True)
class Swapped:
    """What the host keeps of a request.

    Attributes:
        first: logical blocks before it were left on the device, because others share them: they must be found there
            again, or the rest is of no use.
        slots: host slots of the logical blocks from ``first`` on.
        num_tokens: computed tokens, those of the blocks before ``first`` included.
    """

    first: int
    slots: tuple[int, ...]
    num_tokens: int


class SwapSpace:
    """Requests' KV in the host pool. Knows nothing of when; the scheduler says that.

    Args:
        kv: the manager whose blocks move.
        pool: host slots.
    """

    def __init__(self, kv: KVManager, pool: HostPool) -> None:
        self._kv = kv
        self.pool = pool
        self._held: dict[int, Swapped] = {}

    def __len__(self) -> int:
        """Requests in it."""
        return len(self._held)

    def get(self, request_id: int) -> Swapped | None:
        """What is kept of a request, or None."""
        return self._held.get(request_id)

    def slots_for(self, request_id: int, num_computed: int) -> int:
        """Host slots that a request's KV needs: its blocks with content, but for those that others share."""
        return max(0, self._kv.blocks_for(num_computed) - self._kv.num_shared(request_id))

    def out(self, request_id: int, num_computed: int) -> list[BlockSwap]:
        """Copy a request's KV to the host; its blocks may be released at once, for copies out come first in a plan.

        Args:
            request_id: holds blocks, and has nothing here.
            num_computed: tokens whose KV is written, or will be by the steps planned so far.

        Raises:
            ValueError: it has something here already, or the pool has not room for it; nothing was changed.
        """
        if request_id in self._held:
            raise ValueError(f"request {request_id} is swapped out already")
        first = min(self._kv.num_shared(request_id), self._kv.blocks_for(num_computed))
        slots = self.pool.allocate(self._kv.blocks_for(num_computed) - first)
        self._held[request_id] = Swapped(first, tuple(slots), num_computed)
        table = self._kv.table(request_id)
        return [
            BlockSwap(group, blocks[first + index], slot)
            for group, blocks in enumerate(table)
            for index, slot in enumerate(slots)
        ]

    def usable(self, request_id: int, match: PrefixMatch) -> bool:
        """Whether a request has KV here that continues ``match``, and goes further than it."""
        held = self._held.get(request_id)
        return held is not None and held.first <= len(match.nodes) and match.num_tokens < held.num_tokens

    def back(
        self, request_id: int, num_tokens: int, match: PrefixMatch, root: Hashable | None
    ) -> tuple[tuple[tuple[int, ...], ...], list[BlockSwap]]:
        """Give a request blocks again, and copy into them what the match does not have.

        Args:
            request_id: see ``usable``.
            num_tokens: tokens that its blocks must hold in all.
            match: its known prefix, shared and not copied.
            root: as in ``KVManager.allocate``.

        Returns:
            Its whole table by group, and the copies.

        Raises:
            ValueError: too few blocks are free; nothing was changed.
        """
        held = self._held[request_id]
        table = self._kv.allocate(request_id, num_tokens, match, root)
        skipped = len(match.nodes) - held.first
        moved = held.slots[skipped:]
        self.pool.read(moved)
        copies = [
            BlockSwap(group, blocks[len(match.nodes) + index], slot)
            for group, blocks in enumerate(table)
            for index, slot in enumerate(moved)
        ]
        self.drop(request_id)
        return table, copies

    def drop(self, request_id: int) -> Swapped | None:
        """Forget what is kept of a request, if anything; returns it."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self.pool.release(held.slots)
        return held

    def slots(self) -> list[int]:
        """Every slot that a request holds."""
        return [slot for held in self._held.values() for slot in held.slots]

    def request_ids(self) -> set[int]:
        """Whose KV is here."""
        return set(self._held)
