"""What the commands have in common: a model, a device, and how the model is stored and split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import ModelAccount, account, whole_bytes
from foliolm.ledger.step_cost import Coefficients, StepCost, step_cost
from foliolm.plan.checks import real, whole
from foliolm.shape.device import Device
from foliolm.shape.model import ModelShape

GIB = 2**30
CPU_POOL_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class Setting:
    """A model as it would be served.

    Attributes:
        shape: the model.
        device: where, or None where a command needs none.
        quantization: weight format, or None: as stored.
        kv_cache_dtype: ``auto`` or a KV element type.
        tensor_parallel_size: devices that share each replica.
        block_size: tokens a KV block.
        coefficients: host times and efficiencies of the step cost.
    """

    shape: ModelShape
    device: Device | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    block_size: int = 16
    coefficients: Coefficients = field(default_factory=Coefficients)

    def __post_init__(self) -> None:
        whole("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)
        whole("block_size", self.block_size, 1, 2**20)

    @property
    def account(self) -> ModelAccount:
        """The model's bytes and FLOPs on one device."""
        return account(self.shape, self.quantization, self.kv_cache_dtype, self.tensor_parallel_size)

    @property
    def cost(self) -> StepCost:
        """The step cost.

        Raises:
            ConfigError: no device was named.
        """
        return step_cost(self.account, self.need_device(), self.coefficients)

    def need_device(self) -> Device:
        """The device.

        Raises:
            ConfigError: none was named.
        """
        if self.device is None:
            raise ConfigError("device is missing; name a preset, a JSON file or this-machine")
        return self.device

    def with_kv(self, kv_cache_dtype: str) -> Setting:
        """The same with another KV element type."""
        return replace(self, kv_cache_dtype=kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How a device's memory is shared out.

    Attributes:
        gpu_memory_utilization: share of the memory that may be used; None: 0.9, on a CPU the KV pool's own rule.
        max_num_batched_tokens: new tokens that a step may hold; they size the activations.
        max_num_seqs: sequences that a step may hold; they size the logits.
        other_bytes: driver context, captured graphs, communication buffers.
        activation_bytes: beats the estimate where given.
    """

    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    other_bytes: int = 1 * GIB
    activation_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.gpu_memory_utilization is not None:
            real("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, above=True)
        whole("max_num_batched_tokens", self.max_num_batched_tokens)
        whole("max_num_seqs", self.max_num_seqs)
        whole("other_bytes", self.other_bytes, 0)
        if self.activation_bytes is not None:
            whole("activation_bytes", self.activation_bytes, 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """One device's memory, line by line, in bytes: ``memory = weights + activations + reserve + kv_pool``.

    Where the weights alone do not fit, ``kv_pool`` is negative: what is missing.
    """

    memory: int
    weights: int
    activations: int
    reserve: int
    kv_pool: int


def memory_of(setting: Setting, options: MemoryOptions) -> Memory:
    """Share out a device's memory.

    ``reserve`` is what the utilisation leaves alone, plus ``other_bytes``. On a CPU without a stated utilisation the KV
    pool is the smaller of 4 GiB and a quarter of the memory, and the rest is the reserve.
    """
    device = setting.need_device()
    memory = device.memory_bytes
    weights = whole_bytes(setting.account.resident_bytes)
    activations = options.activation_bytes
    if activations is None:
        activations = activation_bytes(setting, options)
    if device.kind == "cpu" and options.gpu_memory_utilization is None:
        pool = min(CPU_POOL_BYTES, memory // 4, memory - weights - activations)
        return Memory(memory, weights, activations, memory - weights - activations - pool, pool)
    utilization = 0.9 if options.gpu_memory_utilization is None else options.gpu_memory_utilization
    reserve = memory - int(memory * utilization) + options.other_bytes
    return Memory(memory, weights, activations, reserve, memory - weights - activations - reserve)


def activation_bytes(setting: Setting, options: MemoryOptions) -> int:
    """An estimate of a step's peak activations on one device.

    Per new token, in 16 bits: the residual and its normed copy, and the wider of Q, K, V with the attention's output
    and the gated MLP's three buffers. Per sampled row: logits in 16 bits and their float32 copy. Engines
    measure it.
    """
    shape, tp = setting.shape, setting.tensor_parallel_size
    heads = shape.num_heads * shape.head_dim
    if shape.mla:
        heads = shape.num_heads * (shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim)
    attention = 2 * heads + 2 * min(heads, shape.num_kv_heads * shape.head_dim)
    width = shape.intermediate_size
    if shape.moe:
        active = shape.moe.experts_per_token * shape.moe.intermediate_size + shape.moe.shared_intermediate_size
        width = max(active, width if shape.moe.first_dense_layers else 0)
    a_token = 2 * shape.hidden_size + max(attention, 3 * width) // tp
    logits = options.max_num_seqs * shape.vocab_size // tp * (2 + 4)
    return 2 * a_token * options.max_num_batched_tokens + logits
