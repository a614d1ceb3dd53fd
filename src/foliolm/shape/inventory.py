"""Every tensor of a model, counted: the one list that parameter counts, bytes, FLOPs and adapter sizes come from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from foliolm.core.errors import ConfigError
from foliolm.shape.model import ModelShape


class Part(enum.StrEnum):
    """What a tensor belongs to; a storage format is chosen, and a read is counted, by part."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    ROUTER = "router"
    NORM = "norm"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A kind of tensor, and how often the model has it.

    Attributes:
        name: as in Hugging Face's modules, without the layer (``q_proj``, ``lm_head``, ``norms``).
        part: what it belongs to.
        rows, cols: a linear's output and input width; a vector has one column.
        layers: in how many layers it stands (1 for what stands outside the layers).
        copies: how many a layer (routed experts; 1 for the rest).
        bias: values of a bias, a copy.
        tied: it is another tensor seen again (a tied output head): read, but not stored.
        kv_heads: it makes K or V by heads, so that tensor parallelism may have to repeat it.
    """

    name: str
    part: Part
    rows: int
    cols: int
    layers: int = 1
    copies: int = 1
    bias: int = 0
    tied: bool = False
    kv_heads: bool = False

    @property
    def params_per_copy(self) -> int:
        """Values in one copy, bias included."""
        return self.rows * self.cols + self.bias

    @property
    def params(self) -> int:
        """Values in all copies of all layers."""
        return self.params_per_copy * self.layers * self.copies


def inventory(shape: ModelShape) -> tuple[Tensor, ...]:
    """List the tensors of ``shape``; a tied output head is listed with ``tied``.

    Raises:
        ConfigError: counts contradict each other.
    """
    tensors = [Tensor("embed_tokens", Part.EMBEDDING, shape.vocab_size, shape.hidden_size)]
    tensors += _mla_attention(shape) if shape.mla else _attention(shape)
    tensors += _mlp(shape)
    tensors += [
        Tensor("layer_norms", Part.NORM, shape.norms_per_layer * shape.hidden_size, 1, shape.num_layers),
        Tensor("final_norm", Part.NORM, shape.hidden_size, 1),
        Tensor("lm_head", Part.HEAD, shape.vocab_size, shape.hidden_size, tied=shape.tie_word_embeddings),
    ]
    return tuple(tensors)


def total_params(shape: ModelShape) -> int:
    """Parameters as stored: a tied head counts once."""
    return sum(tensor.params for tensor in inventory(shape) if not tensor.tied)


def active_params(shape: ModelShape) -> int:
    """Parameters that one token passes: the experts it is routed to, the head, not the looked-up embedding."""
    active = sum(t.params for t in inventory(shape) if t.part not in (Part.EMBEDDING, Part.EXPERT))
    if shape.moe is None:
        return active
    experts = sum(t.params for t in inventory(shape) if t.part is Part.EXPERT)
    return active + experts * shape.moe.experts_per_token // shape.moe.num_experts


def moe_layers(shape: ModelShape) -> int:
    """How many layers hold routed experts."""
    if shape.moe is None:
        return 0
    rest = shape.num_layers - shape.moe.first_dense_layers
    if rest < 0:
        raise ConfigError(
            f"first_dense_layers is {shape.moe.first_dense_layers}; {shape.name} has {shape.num_layers} layers"
        )
    return -(-rest // shape.moe.layer_step)


def _attention(shape: ModelShape) -> list[Tensor]:
    hidden, layers = shape.hidden_size, shape.num_layers
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def linear(name: str, rows: int, cols: int, bias: bool, kv_heads: bool = False) -> Tensor:
        return Tensor(name, Part.ATTENTION, rows, cols, layers, bias=rows if bias else 0, kv_heads=kv_heads)

    tensors = [
        linear("q_proj", q, hidden, shape.qkv_bias),
        linear("k_proj", kv, hidden, shape.qkv_bias, kv_heads=True),
        linear("v_proj", kv, hidden, shape.qkv_bias, kv_heads=True),
        linear("o_proj", hidden, q, shape.o_bias),
    ]
    if shape.qk_norm:
        tensors.append(Tensor("qk_norms", Part.NORM, 2 * shape.head_dim, 1, layers))
    if shape.attention_sinks:
        tensors.append(Tensor("sinks", Part.NORM, shape.num_heads, 1, layers))
    return tensors


def _mla_attention(shape: ModelShape) -> list[Tensor]:
    mla = shape.mla
    assert mla is not None
    hidden, layers, heads = shape.hidden_size, shape.num_layers, shape.num_heads
    q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        tensors = [Tensor("q_proj", Part.ATTENTION, q, hidden, layers)]
    else:
        tensors = [
            Tensor("q_a_proj", Part.ATTENTION, mla.q_lora_rank, hidden, layers),
            Tensor("q_b_proj", Part.ATTENTION, q, mla.q_lora_rank, layers),
            Tensor("q_a_norm", Part.NORM, mla.q_lora_rank, 1, layers),
        ]
    up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return [
        *tensors,
        Tensor("kv_a_proj_with_mqa", Part.ATTENTION, mla.kv_lora_rank + mla.qk_rope_head_dim, hidden, layers),
        Tensor("kv_b_proj", Part.ATTENTION, up, mla.kv_lora_rank, layers),
        Tensor("kv_a_norm", Part.NORM, mla.kv_lora_rank, 1, layers),
        Tensor("o_proj", Part.ATTENTION, hidden, heads * mla.v_head_dim, layers),
    ]


def _mlp(shape: ModelShape) -> list[Tensor]:
    sparse = moe_layers(shape)
    dense = _gated(
        Part.MLP, "", shape.hidden_size, shape.intermediate_size, shape.num_layers - sparse, 1, shape.mlp_bias
    )
    if shape.moe is None:
        return dense
    moe = shape.moe
    bias = moe.num_experts if moe.router_bias else 0
    tensors = dense if sparse < shape.num_layers else []
    rows = moe.num_experts + moe.shared_gate
    tensors.append(Tensor("router", Part.ROUTER, rows, shape.hidden_size, sparse, bias=bias))
    tensors += _gated(
        Part.EXPERT, "", shape.hidden_size, moe.intermediate_size, sparse, moe.num_experts, moe.expert_bias
    )
    if moe.shared_intermediate_size:
        tensors += _gated(Part.MLP, "shared_", shape.hidden_size, moe.shared_intermediate_size, sparse, 1, False)
    return tensors


def _gated(part: Part, prefix: str, hidden: int, width: int, layers: int, copies: int, bias: bool) -> list[Tensor]:
    return [
        Tensor(f"{prefix}gate_proj", part, width, hidden, layers, copies, width if bias else 0),
        Tensor(f"{prefix}up_proj", part, width, hidden, layers, copies, width if bias else 0),
        Tensor(f"{prefix}down_proj", part, hidden, width, layers, copies, hidden if bias else 0),
    ]
