"""Whether an evicted prefix is worth a copy on the host, and whether one there is worth copying back: by price."""

from __future__ import annotations

from foliolm.core.protocols import Prices
from foliolm.kv.prefix import Node
from foliolm.scheduler.request import Request
from foliolm.scheduler.state import SchedulerState

PRICES_KEPT = 64
"""Plans after which the prices of blocks are looked up anew: streams come and go slowly, and evictions are many."""
TRIED = 64
"""Of the blocks that are not worth it, one in so many is copied, so that it shows when they come to be wanted."""

Costs = tuple[tuple[str, float], ...]


class Offloading:
    """The decisions about the host tier of the prefix cache.

    A block is copied out where ``out + reuse · in <= reuse · compute``: what it costs to move a block of a prefix of
    its length out and, as often as such blocks have been wanted again, in; and what computing it as often would. A
    block with others behind it on the host follows them, since these are of no use without it.

    Args:
        state: the scheduler's; its host pool is used.
        prices: predicts; None: nothing can be compared, and ``auto`` copies nothing.
    """

    def __init__(self, state: SchedulerState, prices: Prices | None) -> None:
        self._state = state
        self._always = state.config.kv_offloading == "always"
        self._prices = prices
        self._size = state.config.block_size
        self._per_block: dict[int, tuple[float, float]] = {}
        self._priced_in = -PRICES_KEPT
        self._declined = 0
        self._choice: tuple[int, int, bool, Costs] = (-1, -1, False, ())
        self._out_s = self._compute_s = 0.0
        if state.config.keeps_evicted:
            state.kv.offload_to(state.swap.pool, self.worth_keeping)

    def worth_keeping(self, node: Node) -> bool:
        """Whether a node that is evicted from the device shall be copied to the host."""
        known = self._prices is not None and self._prices.known
        if not known:
            return self._always
        host = self._state.kv.host
        assert host is not None
        reuse = host.reuse.rate
        move, compute = self._prices_at(node.depth)
        copied, computed = move + reuse * move, reuse * compute
        wanted = self._always or copied <= computed or any(child.copy for child in node.children.values())
        if not wanted and move < float("inf"):
            self._declined += 1
            wanted = self._declined % TRIED == 0
        if wanted:
            self._out_s += copied
            self._compute_s += computed
        return wanted

    def take_costs(self) -> Costs:
        """Predicted seconds of what was copied out since the last call, and of computing it when it is wanted."""
        costs = (("copy", self._out_s), ("compute", self._compute_s)) if self._compute_s else ()
        self._out_s = self._compute_s = 0.0
        return costs

    def worth_copying(self, request: Request) -> tuple[bool, Costs]:
        """Whether a waiting request takes what the host has of its prompt, and the seconds of that and of computing it.

        The seconds hold all that is left to compute beside it.
        """
        match = request.match
        rid, generation = request.request_id, request.match_generation
        if self._choice[:2] == (rid, generation):
            return self._choice[2:]
        costs: Costs = ()
        if self._prices is not None and self._prices.known:
            decodes = self._state.decodes
            streams, context = len(decodes), decodes.context_tokens
            known, blocks = match.num_tokens, len(match.on_host)
            there = known + blocks * self._size
            price, tokens = self._prices.recompute, request.num_tokens
            copied = self._prices.swap(blocks) / 2 + price(tokens, there, streams, context)
            if copied < float("inf"):
                costs = (("copy", copied), ("compute", price(tokens, known, streams, context)))
        wanted = self._always or bool(costs and costs[0][1] <= costs[1][1])
        self._choice = (rid, generation, wanted, costs)
        return wanted, costs

    def _prices_at(self, depth: int) -> tuple[float, float]:
        """Seconds a block, of a prefix about so long: to move it one way, and to compute it with what follows it."""
        assert self._prices is not None
        steps = self._state.counters.steps
        if steps - self._priced_in >= PRICES_KEPT:
            self._priced_in = steps
            self._per_block.clear()
        blocks = 1 << (depth.bit_length() - 1)
        found = self._per_block.get(blocks)
        if found is None:
            decodes = self._state.decodes
            streams, context = len(decodes), decodes.context_tokens
            price, known = self._prices.recompute, blocks * self._size
            tokens = known + self._size  # something is left to compute in any case
            compute = price(tokens, 0, streams, context) - price(tokens, known, streams, context)
            found = self._per_block[blocks] = (self._prices.swap(blocks) / 2 / blocks, compute / blocks)
        return found
