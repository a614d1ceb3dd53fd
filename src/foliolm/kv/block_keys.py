"""What a prefix is known by: each full block's tokens as one value, made once a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

_WIDTH = array("q").itemsize


class BlockKeys:
    """Keys of the full blocks of a token sequence that may grow at its end; made when they are asked for, and kept.

    Equal keys are equal tokens: a key holds them all. It is a byte string, whose hash Python computes once and which is
    cut out of a prompt a hundred times as fast as its tokens are looked at.

    Args:
        tokens: the sequence; what stands in it does not change.
        block_size: tokens a block.
    """

    __slots__ = ("_block_size", "_keys", "_tokens")

    def __init__(self, tokens: Sequence[int], block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._keys: list[Hashable] = []

    def __len__(self) -> int:
        """Tokens, those of a last block that is not full included."""
        return len(self._tokens)

    def first(self, count: int) -> list[Hashable]:
        """Keys of at least the first ``count`` blocks, which must be full. Not to be changed."""
        keys, size = self._keys, self._block_size
        if len(keys) < count:
            fresh = self._tokens[len(keys) * size : count * size]
            try:
                data = array("q", fresh).tobytes()
            except OverflowError:  # identities of a trace may be of any size
                keys += [_key(fresh[start : start + size]) for start in range(0, len(fresh), size)]
            else:
                width = _WIDTH * size
                keys += [data[start : start + width] for start in range(0, len(data), width)]
        return keys


def _key(tokens: Sequence[int]) -> Hashable:
    try:
        return array("q", tokens).tobytes()
    except OverflowError:
        return tuple(tokens)


def tokens_of(key: Hashable) -> list[int]:
    """The tokens that a block's key holds."""
    if isinstance(key, bytes):
        return array("q", key).tolist()
    return list(key) if isinstance(key, tuple) else []
