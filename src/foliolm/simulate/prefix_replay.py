"""What a prefix cache of some size would have found in a trace: the product's prefix index and block pool, no engine.

The rules, chosen so that nothing but the cache is measured: a request looks up its chain when it arrives, from the
first block to the first miss; then all its blocks are in the cache, its tail being the oldest of them; then the oldest
blocks over the limit are dropped. No time passes, and no token is held back for its logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foliolm.kv.pool import BlockPool
from foliolm.kv.prefix import PrefixIndex
from foliolm.simulate.prefix_traces import PrefixChain

_ROOT = None


@dataclass(frozen=True, slots=True)
class PrefixReplay:
    """What came of it.

    Attributes:
        requests: replayed.
        prompt_tokens, hit_tokens: of all prompts, and those of them that were found.
        prompt_blocks, hit_blocks: the same in blocks.
        distinct_blocks: different prefixes in the trace.
        evicted_blocks: dropped for want of room.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    prompt_blocks: int
    hit_blocks: int
    distinct_blocks: int
    evicted_blocks: int

    @property
    def token_hit_ratio(self) -> float:
        """Share of the prompts' tokens that were found, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_hit_ratio(self) -> float:
        """Share of the prompts' blocks that were found, 0 to 1."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    def to_json(self) -> dict[str, float | int]:
        """Ratios rounded to 5 places."""
        return {
            "requests": self.requests,
            "token_hit_ratio": round(self.token_hit_ratio, 5),
            "block_hit_ratio": round(self.block_hit_ratio, 5),
            "distinct_blocks": self.distinct_blocks,
            "hit_tokens": self.hit_tokens,
            "prompt_tokens": self.prompt_tokens,
            "hit_blocks": self.hit_blocks,
            "prompt_blocks": self.prompt_blocks,
            "evicted_blocks": self.evicted_blocks,
        }


class PrefixCache:
    """A prefix cache without an engine: a hash id takes the place of a block's tokens.

    Args:
        room: most blocks that are in it between two requests.
        largest: most blocks of one request; while it is taken in, so many more may be there.
    """

    def __init__(self, room: int, largest: int) -> None:
        self._room = room
        self._index = PrefixIndex(1)
        self._pool = BlockPool(room + largest + 1)
        self.evicted_blocks = 0

    def take(self, hash_ids: tuple[int, ...]) -> int:
        """A request arrives; returns how many of its leading blocks were there."""
        index, pool = self._index, self._pool
        found = index.match(_ROOT, hash_ids)
        pool.share(node.blocks[0] for node in found)
        fresh = pool.allocate(len(hash_ids) - len(found))
        parent = found[-1] if found else None
        index.publish(_ROOT, parent, hash_ids[len(found) :], [(block,) for block in fresh])
        pool.keep(fresh)
        pool.release([node.blocks[0] for node in found] + fresh)
        while pool.num_idle > self._room:
            oldest = pool.oldest_idle()
            assert oldest is not None
            for node in index.forget(oldest):
                pool.drop(node.blocks[0])
                self.evicted_blocks += 1
        return len(found)


def replay_prefixes(chains: Iterable[PrefixChain], block_tokens: int, cache_blocks: int | None = None) -> PrefixReplay:
    """Replay a trace.

    Args:
        chains: in order of arrival.
        block_tokens: tokens of a block; a prompt's last one may be shorter.
        cache_blocks: most blocks that the cache keeps; None: all.
    """
    listed = list(chains)
    distinct = len({one for chain in listed for one in chain.hash_ids})
    largest = max((len(chain.hash_ids) for chain in listed), default=0)
    cache = PrefixCache(sum(len(chain.hash_ids) for chain in listed) if cache_blocks is None else cache_blocks, largest)
    hit_tokens = hit_blocks = 0
    for chain in listed:
        found = cache.take(chain.hash_ids)
        hit_blocks += found
        hit_tokens += min(found * block_tokens, chain.num_tokens)
    return PrefixReplay(
        requests=len(listed),
        prompt_tokens=sum(chain.num_tokens for chain in listed),
        hit_tokens=hit_tokens,
        prompt_blocks=sum(len(chain.hash_ids) for chain in listed),
        hit_blocks=hit_blocks,
        distinct_blocks=distinct,
        evicted_blocks=cache.evicted_blocks,
    )
