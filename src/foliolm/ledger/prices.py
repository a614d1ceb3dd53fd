"""What the treatments of memory pressure cost, by the ledger's newest step cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foliolm.ledger.step_cost import StepCounts
from foliolm.ledger.treatments import Running, recompute_seconds

if TYPE_CHECKING:
    from foliolm.ledger.ledger import Ledger


class LedgerPrices:
    """`Prices` out of the ledger's step cost, which may be replaced while the engine runs.

    Args:
        ledger: its current step cost predicts.
        block_size: tokens a block.
        max_num_batched_tokens: new tokens a step; chunks are what decodes leave of it.
    """

    def __init__(self, ledger: Ledger, block_size: int, max_num_batched_tokens: int) -> None:
        self._ledger = ledger
        self._block_size = block_size
        self._budget = max_num_batched_tokens

    @property
    def known(self) -> bool:
        """See `Prices`."""
        return self._ledger.cost is not None

    def swap(self, blocks: int) -> float:
        """See `Prices`: ``2 · (copies · t_copy + bytes / link)``; nothing of it is taken to overlap with a step."""
        cost = self._ledger.cost
        if cost is None or cost.host_link is None:
            return math.inf
        link, kv = cost.host_link, cost.model.kv
        copies = blocks * sum(link.copies_per_block or spec.num_layers for spec in kv)
        moved = blocks * sum(spec.bytes_per_block(self._block_size) for spec in kv)
        return 2 * link.seconds(copies, moved)

    def recompute(self, tokens: int, cached: int, num_decodes: int, decode_context: int) -> float:
        """See `Prices`."""
        cost = self._ledger.cost
        if cost is None:
            return math.inf
        context = decode_context / num_decodes if num_decodes else 0.0
        return recompute_seconds(cost, tokens, cached, Running(num_decodes, context, self._budget))

    def decode_step(self, num_decodes: int, decode_context: int) -> float:
        """See `Prices`."""
        cost = self._ledger.cost
        if cost is None or not num_decodes:
            return 0.0
        context = (float(decode_context),) * len(cost.model.kv)
        return cost.seconds(StepCounts(num_decodes, num_decodes, num_decodes, context))

    def adapter(self, load_id: int) -> float:
        """See `Prices`: its bytes at the rate at which weights are read; 0 where its size is not known."""
        cost, size = self._ledger.cost, self._ledger.adapters.get(load_id)
        if cost is None or size is None:
            return 0.0
        return size.num_bytes / (cost.coefficients.weights * cost.bandwidth)
