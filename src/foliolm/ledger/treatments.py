"""What each treatment of memory pressure costs: swap to the host, or give the KV up and compute it again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from foliolm.ledger.accounts import ModelAccount, blocks_of, sequence_bytes
from foliolm.ledger.host_link import HostLink
from foliolm.ledger.step_cost import StepCost, StepCounts

_PRICED_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Running:
    """What else runs while a request is brought back.

    Attributes:
        batch: decode rows in each step.
        context: tokens of context of each.
        max_num_batched_tokens: new tokens that a step may hold; the chunk is what the decodes leave of it.
    """

    batch: float
    context: float
    max_num_batched_tokens: int

    @property
    def chunk(self) -> int:
        """Prefill tokens that fit a step beside the decodes."""
        return max(1, math.floor(self.max_num_batched_tokens - self.batch))


def swap_seconds(model: ModelAccount, tokens: int, link: HostLink, block_size: int, overlap_s: float = 0.0) -> float:
    """Seconds to move a request's blocks out and in again.

    ``2 · (copies · t_copy + bytes / (efficiency · link)) − overlap``: whole blocks, and what of it runs under
    computation subtracted.
    """
    if tokens == 0:
        return 0.0
    copies = sum(blocks_of(spec, tokens, block_size) * (link.copies_per_block or spec.num_layers) for spec in model.kv)
    moved = sequence_bytes(model, tokens, block_size)
    return max(0.0, 2 * link.seconds(copies, moved) - overlap_s)


def recompute_seconds(cost: StepCost, tokens: int, cached: int, running: Running) -> float:
    """Marginal seconds to compute ``tokens`` again: ``Σ [t(step with the chunk) − t(step without)]``.

    Args:
        cost: the step cost.
        tokens: tokens of the request, all of them lost but for those cached.
        cached: leading tokens that the prefix cache gives back.
        running: the steps that carry the chunks. With nothing running the steps exist for this request alone, so their
            whole time counts.
    """

    def seconds(new: int, done: int, last: bool) -> float:
        return marginal_seconds(cost, running, new, done, last)

    return sum_over_chunks(seconds, cached, tokens, running.chunk)


def marginal_seconds(cost: StepCost, running: Running, new: int, cached: int, last: bool = True) -> float:
    """Seconds that a chunk adds to a step of running decodes; all of the step's where nothing runs."""
    decodes = cost.decode_counts(running.batch, running.context)
    both = replace(
        decodes,
        new_tokens=decodes.new_tokens + new,
        sampled=decodes.sampled + last,
        sequences=decodes.sequences + 1,
        prefills=((new, cached),),
    )
    return cost.seconds(both) - cost.seconds(decodes)


def prefill_seconds(cost: StepCost, tokens: int, cached: int = 0, chunk: int | None = None) -> float:
    """Seconds to prefill ``tokens`` of which ``cached`` are there already, alone, in chunks (None: at once)."""

    def seconds(new: int, done: int, last: bool) -> float:
        return cost.seconds(StepCounts(new, int(last), 1, (0.0,) * len(cost.model.kv), ((new, done),)))

    return sum_over_chunks(seconds, cached, tokens, chunk or max(1, tokens))


def sum_over_chunks(seconds: Callable[[int, int, bool], float], start: int, tokens: int, chunk: int) -> float:
    """Sum the chunks' seconds, of (new tokens, tokens before, whether it is the last), from ``start`` to ``tokens``.

    Over some hundreds of chunks 257 of them are priced and the rest interpolated: a chunk's cost is linear in what
    stands before it, but where a window begins to clamp.
    """
    if start >= tokens:
        return 0.0
    before_last = (tokens - start - 1) // chunk
    total = seconds(tokens - start - before_last * chunk, start + before_last * chunk, True)
    if before_last <= _PRICED_CHUNKS:
        return total + sum(seconds(chunk, start + i * chunk, False) for i in range(before_last))
    points = [i * (before_last - 1) // _PRICED_CHUNKS for i in range(_PRICED_CHUNKS + 1)]
    prices = [seconds(chunk, start + i * chunk, False) for i in points]
    for (low, high), (first, second) in zip(pairwise(points), pairwise(prices), strict=True):
        total += (high - low) * first + (second - first) * (high - low - 1) / 2
    return total + prices[-1]


@dataclass(frozen=True, slots=True)
class Turns:
    """Where the cheaper treatment changes, in tokens.

    Attributes:
        first: the shortest length at which recompute is cheaper, or None where it never is. Above one block where the
            first token of a chunk already slows the running decodes down.
        break_even: the shortest length from which swap is cheaper at every length, or None where one treatment is
            cheaper at all of them, or recompute at the longest: then nothing is to decide.
    """

    first: int | None
    break_even: int | None


def turning_points(
    cost: StepCost, link: HostLink, block_size: int, cached: int, running: Running, longest: int
) -> Turns:
    """Find where swap and recompute cost the same, for lengths in whole blocks up to ``longest``.

    Both grow with the length, recompute faster in the end (attention is quadratic). A grid of 49 lengths brackets the
    changes of sign, bisection finds them.
    """

    def swap_wins(blocks: int) -> bool:
        tokens = min(blocks * block_size, longest)
        swap = swap_seconds(cost.model, tokens, link, block_size)
        return swap <= recompute_seconds(cost, tokens, min(cached, tokens), running)

    def change(low: int, high: int) -> int:
        """The first of the blocks after ``low`` that agrees with ``high``, which differs from ``low``."""
        goal = swap_wins(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if swap_wins(middle) == goal else (middle, high)
        return high

    most = max(1, longest // block_size)
    grid = sorted({max(1, round(math.exp(math.log(most) * i / 48))) for i in range(49)})
    losses = [i for i, blocks in enumerate(grid) if not swap_wins(blocks)]
    if not losses:
        return Turns(None, None)
    first = grid[0] if losses[0] == 0 else change(grid[losses[0] - 1], grid[losses[0]])
    if losses[-1] == len(grid) - 1:
        return Turns(first * block_size, None)
    even = change(grid[losses[-1]], grid[losses[-1] + 1])
    return Turns(first * block_size, min(even * block_size, longest))
