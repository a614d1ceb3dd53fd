"""One decoder layer: attention, then a gated MLP, each on the normalised residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foliolm.model.lora import LayerLora
from foliolm.ops.activation import silu_mul
from foliolm.ops.attention import Attention, AttentionLayout
from foliolm.ops.kv_write import write_kv
from foliolm.ops.linear import Linear
from foliolm.ops.norm import rms_norm
from foliolm.ops.rope import Rotation, rotate


@dataclass(frozen=True, slots=True)
class LayerKV:
    """A layer's part of the KV pool: keys and values, [blocks, p, kv heads, D] each."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class DecoderLayer:
    """Weights of one layer.

    Attributes:
        input_norm, post_norm: [hidden], before attention and before the MLP.
        qkv: to [(heads + 2 · kv heads) · D], queries first, then keys, then values.
        o, gate_up, down: as in Llama; gate first.
        qk_norm: [heads + kv heads, D] weights of the norms over each head of Q and K, or None.
        num_heads, num_kv_heads, head_dim, eps: sizes, and the norms' epsilon.
        group: index of its KV group.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    qk_norm: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    group: int

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        layout: AttentionLayout,
        kv: LayerKV,
        attention: Attention,
        rows: Tensor | None = None,
        lora: LayerLora | None = None,
    ) -> Tensor:
        """Residual stream [N, hidden] in and out; with ``rows`` [S], only those tokens come out.

        Raises nothing of its own. Keys and values of all N tokens are written, whatever ``rows`` says.
        """
        attended = self._attend(rms_norm(x, self.input_norm, self.eps), rotation, layout, kv, attention, lora)
        if rows is not None:
            # After the last layer's attention only tokens that need logits matter.
            if not len(rows):
                return x[:0]
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        behind = rows is not None
        x = self.o.add_to(x, attended)
        if lora is not None:
            lora.add_to(x, attended, "o", behind)
        normed = rms_norm(x, self.post_norm, self.eps)
        gate_up = self.gate_up(normed)
        if lora is not None:
            lora.add_to(gate_up, normed, "gate_up", behind)
        activated = silu_mul(gate_up)
        x = self.down.add_to(x, activated)
        if lora is not None:
            lora.add_to(x, activated, "down", behind)
        return x

    def _attend(
        self,
        x: Tensor,
        rotation: Rotation,
        layout: AttentionLayout,
        kv: LayerKV,
        attention: Attention,
        lora: LayerLora | None,
    ) -> Tensor:
        heads = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x)
        if lora is not None:
            lora.add_to(qkv, x, "qkv")
        qk = qkv[:, : heads * self.head_dim].view(-1, heads, self.head_dim)
        if self.qk_norm is not None:
            qk = rms_norm(qk, None, self.eps).mul_(self.qk_norm)
        qk = rotate(qk, rotation)
        values = qkv[:, heads * self.head_dim :]
        keys = qk[:, self.num_heads :]
        write_kv(
            kv.keys, kv.values, layout.slots, qk.view(qkv.shape[0], -1)[:, self.num_heads * self.head_dim :], values
        )
        own = values.view(-1, self.num_kv_heads, self.head_dim)
        return attention(qk[:, : self.num_heads], keys, own, kv.keys, kv.values, layout)
