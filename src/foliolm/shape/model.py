"""What a model is: the sizes that decide its memory, its arithmetic and its layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; names as in Hugging Face's ``rope_scaling``.

    Attributes:
        kind: ``linear``, ``llama3`` or ``yarn``.
        factor: how many times the context grows.
        original_max_position: the context that the model was trained at (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: yarn; attention_factor None: derived.
    """

    kind: str
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Mixture of experts: sizes of the expert layers.

    Attributes:
        num_experts: routed experts a layer.
        experts_per_token: active routed experts a token.
        intermediate_size: of one routed expert.
        num_shared_experts, shared_intermediate_size: experts that every token passes, and their total width.
        first_dense_layers: leading layers with an ordinary MLP.
        layer_step: every how many layers (after those) is a MoE layer; 1 for all.
        router_bias: the router has a value an expert beside its matrix (a bias, or DeepSeek's score correction).
        expert_bias: an expert's linears have biases.
        shared_gate: the shared expert's output is scaled by a gate of one row (Qwen2-MoE).
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    first_dense_layers: int = 0
    layer_step: int = 1
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Multi-head latent attention (DeepSeek): the ranks and head parts."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer's shape.

    Attributes:
        name: for people.
        family: ``llama``, ``mistral``, ``qwen2``, ``qwen3``, or another family that can be planned but not run.
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: counts.
        max_position_embeddings: longest context, in tokens, scaling included.
        rms_norm_eps, rope_theta, rope_scaling: as in config.json.
        tie_word_embeddings: the output head is the input embedding.
        qkv_bias, o_bias, mlp_bias: which linears have a bias.
        qk_norm: RMSNorm over each head of Q and K before RoPE.
        norms_per_layer: RMSNorms as wide as the hidden size in a layer; Gemma 2 and 3 have four.
        attention_sinks: a learnt sink logit a head (gpt-oss).
        sliding_window: tokens that a windowed layer looks back (the token itself included), or None.
        windowed_layers: which layers are windowed; empty with a ``sliding_window``: all of them.
        moe, mla: set where the model has them.
        weight_dtype: as stored: ``bfloat16``, ``float16``, ``float32``, or a quantised type (``q4_1``, ``fp8``, …).
        weight_bits: average stored bits a matrix weight, scales included.
        embedding_bits: of the embedding and the output head, where they are stored otherwise; None: as
            ``weight_dtype`` implies.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    moe: MoEShape | None = None
    mla: MLAShape | None = None
    weight_dtype: str = "bfloat16"
    weight_bits: float = 16.0
    norms_per_layer: int = 2
    attention_sinks: bool = False
    embedding_bits: float | None = None
