"""The accounts: bytes and FLOPs of a model on one device, as small pure functions.

Notation as in the formulas below: `D_w` weight bytes that a step reads, `k` KV bytes a token, `b` sequences a step, `L`
tokens of context, `N` new tokens of a step. With tensor parallelism every number is one device's share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foliolm.core.errors import ConfigError
from foliolm.core.kvspec import KVSpec
from foliolm.shape.formats import weight_format
from foliolm.shape.inventory import Part, Tensor, inventory, moe_layers
from foliolm.shape.kv_specs import kv_heads_per_device, kv_specs
from foliolm.shape.model import ModelShape


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of one device.

    Attributes:
        layers: layers that have them.
        num_experts, experts_per_token: a layer.
        bytes_per_expert: of one expert in one layer.
        params_per_expert: the same in values.
    """

    layers: int
    num_experts: int
    experts_per_token: int
    bytes_per_expert: float
    params_per_expert: float


@dataclass(frozen=True, slots=True)
class ModelAccount:
    """What one device holds and reads of a model.

    Attributes:
        name: of the model.
        tensor_parallel_size: devices that share it.
        compute: the number type of the matrix products: ``bf16``, ``fp8``, ``int8`` or ``fp32``.
        body_bytes: matrices, norms and biases of all layers and the final norm; no routed experts.
        head_bytes: the output head, read if something is sampled.
        embedding_bytes: the input embedding table as stored beside the head: 0 where the head is tied to it.
        experts: routed experts, or None.
        body_params: values behind ``body_bytes``, each used once a token.
        head_params: values of the output head.
        kv: groups of layers that keep KV alike.
        attention_flops_per_pair: FLOPs of one query token against one cached token, a layer:
            ``2 · heads · (d_qk + d_v)``.
        decode_flops_per_pair: the same where a decode step computes in the latent space (MLA), else equal.
        hidden_size, num_layers, num_heads, vocab_size: of the whole model.
    """

    name: str
    tensor_parallel_size: int
    compute: str
    body_bytes: float
    head_bytes: float
    embedding_bytes: float
    experts: Experts | None
    body_params: float
    head_params: float
    kv: tuple[KVSpec, ...]
    attention_flops_per_pair: float
    decode_flops_per_pair: float
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int

    @property
    def resident_bytes(self) -> float:
        """Bytes of all weights as stored."""
        experts = 0.0
        if self.experts:
            experts = self.experts.layers * self.experts.num_experts * self.experts.bytes_per_expert
        return self.body_bytes + self.head_bytes + self.embedding_bytes + experts

    @property
    def active_body_params(self) -> float:
        """Values that one token passes in the layers, routed experts included: DESIGN's P_body."""
        if self.experts is None:
            return self.body_params
        experts = self.experts
        return self.body_params + experts.layers * experts.experts_per_token * experts.params_per_expert

    @property
    def kv_bytes_per_token(self) -> int:
        """`k`: bytes that a token adds while it is inside every window."""
        return sum(spec.bytes_per_token for spec in self.kv)


def account(
    shape: ModelShape,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
) -> ModelAccount:
    """Open the account of ``shape`` on one of ``tensor_parallel_size`` devices.

    Matrices are split evenly (embedding and head by vocabulary), but for K and V projections that there are too few KV
    heads to split, and for routers, norms and latent projections, which every device keeps whole (Megatron-LM's split,
    arXiv 1909.08053, section 3).

    Raises:
        ConfigError: an unknown format, or heads that do not divide among the devices.
    """
    tp = tensor_parallel_size
    kv_share = 1.0 if shape.mla else kv_heads_per_device(shape, tp) / shape.num_kv_heads
    weights = weight_format(shape, quantization)
    totals: dict[Part, list[float]] = {part: [0.0, 0.0] for part in Part}
    for tensor in inventory(shape):
        params = tensor.params * _device_share(tensor, tp, kv_share)
        totals[tensor.part][0] += params
        totals[tensor.part][1] += params * weights.bits(tensor.part) / 8
    body = [totals[part] for part in (Part.ATTENTION, Part.MLP, Part.ROUTER, Part.NORM)]
    qk, v, latent = _head_dims(shape)
    heads = shape.num_heads / tp
    return ModelAccount(
        name=shape.name,
        tensor_parallel_size=tp,
        compute=weights.compute,
        body_bytes=sum(part[1] for part in body),
        head_bytes=totals[Part.HEAD][1],
        embedding_bytes=0.0 if shape.tie_word_embeddings else totals[Part.EMBEDDING][1],
        experts=_experts(shape, totals[Part.EXPERT]),
        body_params=sum(part[0] for part in body),
        head_params=totals[Part.HEAD][0],
        kv=kv_specs(shape, kv_cache_dtype, tp),
        attention_flops_per_pair=2 * heads * (qk + v),
        decode_flops_per_pair=2 * heads * latent,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
    )


def distinct_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """Expected distinct experts that ``tokens`` tokens reach in a layer: ``E · (1 − (1 − e/E)^N)``.

    Routing is taken as uniform and independent, which is an upper bound: skewed routers reach fewer.
    """
    if tokens <= 0:
        return 0.0
    missed: float = (1.0 - experts_per_token / num_experts) ** tokens
    return num_experts * (1.0 - missed)


def weight_bytes_per_step(model: ModelAccount, tokens: float, sampled: bool = True) -> float:
    """`D_w`: weight bytes that a step of ``tokens`` new tokens reads.

    Every matrix once, whatever the batch; the input embedding is looked up, so it is left out; the output head only if
    something is sampled; of routed experts the distinct ones (`distinct_experts`).
    """
    read = model.body_bytes + (model.head_bytes if sampled else 0.0)
    if model.experts:
        moe = model.experts
        read += moe.layers * moe.bytes_per_expert * distinct_experts(moe.num_experts, moe.experts_per_token, tokens)
    return read


def kv_bytes_of_context(model: ModelAccount, context: float) -> float:
    """`L · k`: KV bytes that a token's attention reads, and that a sequence keeps: ``Σ_l min(L, window_l) · k_l``."""
    return sum(min(context, spec.window or context) * spec.bytes_per_token for spec in model.kv)


def read_per_output_token(model: ModelAccount, batch: int, context: int) -> float:
    """Bytes read for each token that a decode step yields: ``d(b, L) = D_w / b + L · k``."""
    return weight_bytes_per_step(model, batch) / batch + kv_bytes_of_context(model, context)


def weight_intensity(model: ModelAccount, batch: int) -> float:
    """FLOPs a weight byte of a decode step: ``2 b / s_w`` where every value has ``s_w`` bytes; less for sparse MoE."""
    return 2.0 * batch * (model.active_body_params + model.head_params) / weight_bytes_per_step(model, batch)


def knee_batch(model: ModelAccount, context: int) -> int | None:
    """Smallest batch b with ``D_w(b) / b ≤ L · k``: past it a bigger batch adds KV traffic almost one for one.

    ``D_w(b) / b`` only falls, for MoE too (`distinct_experts` is concave). None where nothing is kept (L = 0).
    """
    floor = kv_bytes_of_context(model, context)
    if floor <= 0:
        return None

    def past(batch: int) -> bool:
        return weight_bytes_per_step(model, batch) <= batch * floor

    high = 1
    while not past(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if past(middle) else (middle, high)
    return high


def attention_pairs(new: float, cached: float, window: int | None = None) -> float:
    """Pairs of a query token and a key token of a prefill chunk: ``p · c + p² / 2``, clamped to a window.

    Args:
        new: p, tokens of the chunk.
        cached: c, tokens before it.
        window: tokens a layer looks back; None for all. With one, the integral of ``min(c + x, w)`` for x from 0 to p.
    """
    if window is None or cached + new <= window:
        return new * cached + new * new / 2
    grows = max(0.0, window - cached)
    return grows * cached + grows * grows / 2 + (new - grows) * window


def prefill_attention_flops(model: ModelAccount, new: float, cached: float = 0) -> float:
    """FLOPs of a chunk's attention over all layers: ``Σ_layers 2 · heads · (d_qk + d_v) · pairs``."""
    return sum(
        spec.num_layers * model.attention_flops_per_pair * attention_pairs(new, cached, spec.window)
        for spec in model.kv
    )


def linear_flops(model: ModelAccount, tokens: float, sampled: float) -> float:
    """FLOPs of the matrices: ``2 · (P_body · N + P_head · S)``; the head is computed for sampled rows only."""
    return 2.0 * (model.active_body_params * tokens + model.head_params * sampled)


def lora_params(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> int:
    """Values of one LoRA adapter: ``Σ rank · (in + out)`` over its target linears of all layers (arXiv 2106.09685).

    Raises:
        ConfigError: no targets, an unknown target, or a rank below 1 or over the hidden size.
    """
    if rank < 1 or rank > shape.hidden_size:
        raise ConfigError(f"rank is {rank}; it must be from 1 to the hidden size, {shape.hidden_size}")
    if not targets:
        raise ConfigError("targets is empty; name at least one linear")
    linears = [t for t in inventory(shape) if t.name.endswith("_proj") or t.name == "kv_a_proj_with_mqa"]
    names = {t.name for t in linears}
    total = 0
    for target in dict.fromkeys(targets):
        if target not in names:
            raise ConfigError(f"targets: {shape.name} has no linear {target!r}; it has {', '.join(sorted(names))}")
        total += sum(rank * (t.rows + t.cols) * t.layers * t.copies for t in linears if t.name == target)
    return total


def sequence_bytes(model: ModelAccount, context: int, block_size: int) -> int:
    """KV bytes that one sequence of ``context`` tokens takes, in whole blocks of each group."""
    return sum(blocks_of(spec, context, block_size) * spec.bytes_per_block(block_size) for spec in model.kv)


def blocks_of(spec: KVSpec, context: int, block_size: int) -> int:
    """Blocks that one sequence takes of a group: ``ceil(L / p)``.

    A window of w tokens needs at most ``ceil((w − 1) / p) + 1``: its first block may be partly behind it.
    """
    blocks = -(-context // block_size)
    return min(blocks, -(-(spec.window - 1) // block_size) + 1) if spec.window else blocks


def all_reduce_bytes(model: ModelAccount, tokens: float, bytes_per_value: float = 2.0) -> float:
    """Bytes that each device sends in a step: two ring all-reduces a layer of N · hidden values.

    A ring all-reduce over t devices sends ``2 (t − 1) / t`` of the tensor (Patarasuk and Yuan, 2009).
    """
    tp = model.tensor_parallel_size
    return 2 * model.num_layers * tokens * model.hidden_size * bytes_per_value * 2 * (tp - 1) / tp


def ridge_batch(model: ModelAccount, bandwidth: float, flops: float) -> int | None:
    """Smallest batch whose matrix FLOPs take longer than reading its weights: compute binds from there on.

    ``2 b P_active / F ≥ D_w(b) / BW``; with one dense 16-bit model that is ``b ≥ F / BW`` (the roofline's ridge,
    Williams et al., 2009). None where no batch up to 2^20 does.
    """
    batch = 1
    while batch <= 2**20:
        if _compute_binds(model, batch, bandwidth, flops):
            low = batch // 2
            while batch - low > 1:
                middle = (low + batch) // 2
                low, batch = (low, middle) if _compute_binds(model, middle, bandwidth, flops) else (middle, batch)
            return batch
        batch *= 2
    return None


def _compute_binds(model: ModelAccount, batch: int, bandwidth: float, flops: float) -> bool:
    return linear_flops(model, batch, batch) / flops >= weight_bytes_per_step(model, batch) / bandwidth


def _device_share(tensor: Tensor, tp: int, kv_share: float) -> float:
    whole = tensor.part in (Part.NORM, Part.ROUTER) or tensor.name in ("q_a_proj", "kv_a_proj_with_mqa")
    if whole:
        return 1.0
    return kv_share if tensor.kv_heads else 1.0 / tp


def _head_dims(shape: ModelShape) -> tuple[int, int, int]:
    """d_qk, d_v, and the width of both products of a decode step together."""
    if shape.mla is None:
        return shape.head_dim, shape.head_dim, 2 * shape.head_dim
    mla = shape.mla
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    return mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim, latent + mla.kv_lora_rank


def _experts(shape: ModelShape, totals: list[float]) -> Experts | None:
    if shape.moe is None:
        return None
    layers = moe_layers(shape)
    count = max(1, layers * shape.moe.num_experts)
    return Experts(layers, shape.moe.num_experts, shape.moe.experts_per_token, totals[1] / count, totals[0] / count)


def whole_bytes(value: float) -> int:
    """A byte count as an integer, rounded up: formats with scales give fractions."""
    return math.ceil(value - 1e-6)
