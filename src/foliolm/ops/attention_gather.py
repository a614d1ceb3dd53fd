"""Paged attention on the CPU: blocks are gathered through the tables, then multiplied in batches.

Blocks are whole rows of the pool ([p, kv heads, D] contiguous), so that a gather copies long runs at nearly memory's
read rate; the products then run over (sequence, KV head) with the heads of a group as rows of one small matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from foliolm.ops.attention import AttentionLayout, Chunk, DecodeGroup

TILE = 256
"""Queries a tile: above it a chunk's causal triangle is cut into tiles, none of which looks past its own end. Smaller
tiles save arithmetic (n/2 + tile/2 keys a query on average) and cost calls."""
MAX_MASK = 8 << 20
"""Largest mask kept, in elements; longer contexts get smaller tiles."""


class CausalMask:
    """Additive masks as slices of one matrix: what a query sees depends only on how far away a key is.

    Args:
        window: tokens that a query looks back, itself included; None: all.
        dtype: of the queries.
    """

    def __init__(self, window: int | None, dtype: torch.dtype) -> None:
        self._window = window
        self._dtype = dtype
        self._reach = 0
        self._base = torch.empty(0, 0, dtype=dtype)

    def slice(self, rows: int, before: int) -> Tensor:
        """[rows, before + rows]: row i looks at columns up to ``before + i``, and back to its window."""
        if rows > self._base.shape[0] or before > self._reach:
            self._grow(max(rows, self._base.shape[0]), max(before, 2 * self._reach))
        start = self._reach - before
        return self._base[:rows, start : start + before + rows]

    def _grow(self, rows: int, reach: int) -> None:
        distance = torch.arange(rows)[:, None] - torch.arange(-reach, rows)[None, :]
        hidden = distance < 0
        if self._window is not None:
            hidden |= distance >= self._window
        self._base = torch.zeros(rows, reach + rows, dtype=self._dtype).masked_fill_(hidden, -math.inf)
        self._reach = reach


class GatherAttention:
    """PyTorch operators only; one instance belongs to one thread."""

    varlen = False

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], CausalMask] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, layout: AttentionLayout
    ) -> Tensor:
        """One layer; see ``Attention``."""
        out = torch.empty(q.shape, dtype=q.dtype)
        for group in layout.groups:
            self._decode(q, k_pool, v_pool, group, out)
        for chunk in layout.chunks:
            self._chunk(q, k, v, k_pool, v_pool, chunk, layout.window, out)
        return out.view(q.shape[0], -1)

    def _decode(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, group: DecodeGroup, out: Tensor) -> None:
        rows, length = group.stop - group.start, group.length
        kv_heads, dim = k_pool.shape[2:]
        shared = q.shape[1] // kv_heads
        queries = q[group.start : group.stop].view(rows, kv_heads, shared, dim)
        scale = dim**-0.5
        scores = self._buffer("scores", (kv_heads, rows, shared, length), q.dtype)
        # Keys and values take turns in one buffer: it stays in cache, which a second one would push out.
        keys = self._gather(k_pool, group.blocks, rows)[:, :length]
        for head in range(kv_heads):
            factors = (queries[:, head], keys[:, :, head].transpose(1, 2))
            if group.mask is None:
                torch.baddbmm(scores[head], *factors, beta=0, alpha=scale, out=scores[head])
            else:
                torch.baddbmm(group.mask, *factors, alpha=scale, out=scores[head])
        weights = torch.softmax(scores, dim=-1)
        values = self._gather(v_pool, group.blocks, rows)[:, :length]
        # A batched product whose result is strided would be taken apart into one product a sequence.
        results = self._buffer("results", (kv_heads, rows, shared, dim), q.dtype)
        for head in range(kv_heads):
            torch.bmm(weights[head], values[:, :, head], out=results[head])
        out[group.start : group.stop].view(rows, kv_heads, shared, dim).copy_(results.transpose(0, 1))

    def _chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        chunk: Chunk,
        window: int | None,
        out: Tensor,
    ) -> None:
        start, count, context = chunk.start, chunk.stop - chunk.start, chunk.context
        if chunk.blocks is None:
            keys, values = k[start : chunk.stop], v[start : chunk.stop]
        else:
            end = context + count
            keys = self._gather(k_pool, chunk.blocks, 1)[0, :end]
            values = self._gather(v_pool, chunk.blocks, 1, "values")[0, :end]
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        queries = q[start : chunk.stop].transpose(0, 1)[None]
        reach = context + count if window is None else min(window, context + count)
        tile = max(16, min(TILE, MAX_MASK // reach))
        mask = self._mask(window, q.dtype)
        grouped = q.shape[1] != k_pool.shape[2]
        for first in range(0, count, tile):
            last = min(first + tile, count)
            low = 0 if window is None else max(0, context + first - window + 1)
            seen = slice(low, context + last)
            part = functional.scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, seen],
                values[:, :, seen],
                attn_mask=mask.slice(last - first, context + first - low),
                enable_gqa=grouped,
            )
            out[start + first : start + last] = part[0].transpose(0, 1)

    def _gather(self, pool: Tensor, blocks: Tensor, rows: int, name: str = "keys") -> Tensor:
        """[rows, width · p, kv heads, D]: the rows' blocks, one after another."""
        flat = pool.view(pool.shape[0], -1)
        target = self._buffer(name, (blocks.shape[0], flat.shape[1]), pool.dtype)
        torch.index_select(flat, 0, blocks, out=target)
        return target.view(rows, -1, pool.shape[2], pool.shape[3])

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Scratch memory that stays: fresh memory would cost a page fault every 4 KiB."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != dtype or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    def _mask(self, window: int | None, dtype: torch.dtype) -> CausalMask:
        key = (window, dtype)
        if key not in self._masks:
            self._masks[key] = CausalMask(window, dtype)
        return self._masks[key]
