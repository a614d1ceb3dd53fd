"""Paged attention by PyTorch's variable-length flash kernel (CUDA)."""

from __future__ import annotations

from torch import Tensor

from foliolm.core.errors import ConfigError
from foliolm.ops.attention import AttentionLayout

PAGE = 256
"""Flash attention 2's paged kernel walks whole pages of this many tokens."""


class VarlenAttention:
    """One kernel call a layer for decodes and chunks together; keys are read through the block table.

    Args:
        block_size: tokens a block.

    Raises:
        ConfigError: the kernel cannot walk blocks of this size.
    """

    varlen = True

    def __init__(self, block_size: int) -> None:
        if block_size % PAGE:
            raise ConfigError(
                f"--block-size is {block_size}; on CUDA the paged attention kernel needs a multiple of {PAGE}"
            )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, layout: AttentionLayout
    ) -> Tensor:
        """One layer; see ``Attention``."""
        from torch.nn.attention.varlen import varlen_attn

        rows = layout.varlen
        if rows is None:
            raise ValueError("the batch was not laid out for the variable-length kernel")
        # The kernel counts the tokens to the left of the query; our window counts the query too.
        left = -1 if layout.window is None else layout.window - 1
        out = varlen_attn(
            q,
            k_pool,
            v_pool,
            rows.cu_seq_q,
            None,
            rows.max_q,
            rows.max_k,
            window_size=(left, 0),
            enable_gqa=q.shape[1] != k_pool.shape[2],
            seqused_k=rows.seqused_k,
            block_table=rows.block_table,
        )
        assert isinstance(out, Tensor)
        return out.reshape(q.shape[0], -1)
