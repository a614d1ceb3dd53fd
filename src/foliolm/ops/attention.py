"""Attention of a packed mixed batch over paged KV: the types, and the choice of a backend.

A step's tokens lie packed, one after another: first the rows that have a single new token, longest context first, then
the chunks. Where their keys and values lie is said by block ids. Everything here is made once a step and used by every
layer of its KV group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Consecutive single-token rows whose contexts are alike, computed as one batch.

    Attributes:
        start, stop: their tokens in the packed batch.
        blocks: [rows · width] physical blocks of each row's last tokens, in order of position; block 0 pads.
        length: gathered positions a row that are looked at, at most ``width · p``.
        mask: [rows, 1, length], 0 where a row may look and −inf elsewhere; None where all may look at all.
    """

    start: int
    stop: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of one request, at least two.

    Attributes:
        start, stop: its tokens in the packed batch.
        blocks: physical blocks from the one that holds position ``first`` to the chunk's last; None where nothing was
            computed before, so that the chunk's own keys and values are all there is.
        context: gathered tokens before the chunk: query i sees gathered positions up to ``context + i``.
    """

    start: int
    stop: int
    blocks: Tensor | None
    context: int


@dataclass(slots=True)
class VarlenRows:
    """The same batch as the variable-length kernel wants it; all tensors int32. One that is kept grows in place.

    Attributes:
        cu_seq_q: [rows + 1] cumulative new tokens.
        block_table: [rows, width].
        seqused_k: [rows] computed tokens, the new ones included.
        max_q, max_k: the largest of each.
    """

    cu_seq_q: Tensor
    block_table: Tensor
    seqused_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Where a step's queries, keys and values of one KV group lie.

    Attributes:
        slots: [N] int64 where each new token's key and value are written.
        window: tokens that a query looks back, itself included; None: all.
        groups, chunks: every token is in exactly one of them.
        varlen: set instead of ``groups`` and ``chunks`` for the variable-length kernel.
    """

    slots: Tensor
    window: int | None
    groups: tuple[DecodeGroup, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    varlen: VarlenRows | None = None


class Attention(Protocol):
    """Computes softmax(q·kᵀ / sqrt(D)) · v for a packed batch whose keys and values are already in the pool.

    Attributes:
        varlen: which form of the batch it wants.
    """

    varlen: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, layout: AttentionLayout
    ) -> Tensor:
        """One layer.

        Args:
            q: [N, heads, D], rows strided.
            k, v: [N, kv heads, D], the step's own, rows strided.
            k_pool, v_pool: [blocks, p, kv heads, D].
            layout: of the layer's KV group.

        Returns:
            [N, heads · D].
        """
        ...


def make_attention(device: torch.device, block_size: int) -> Attention:
    """The attention of a device."""
    if device.type == "cuda":
        from foliolm.ops.attention_varlen import VarlenAttention

        return VarlenAttention(block_size)
    from foliolm.ops.attention_gather import GatherAttention

    return GatherAttention()
