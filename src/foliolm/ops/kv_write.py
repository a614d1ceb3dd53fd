"""Writing new keys and values into the pool."""

from __future__ import annotations

from torch import Tensor


def write_kv(k_pool: Tensor, v_pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store a step's keys and values.

    Args:
        k_pool, v_pool: [blocks, p, kv heads, D], contiguous.
        slots: [N] int64, ``block · p + position within the block``, no two alike.
        k, v: [N, kv heads · D].
    """
    width = k.shape[-1]
    k_pool.view(-1, width).index_copy_(0, slots, k)
    v_pool.view(-1, width).index_copy_(0, slots, v)
