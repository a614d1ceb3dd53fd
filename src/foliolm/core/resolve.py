"""From what a user set to what the scheduler runs with; each derived value says why it is what it is."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.core.config import EngineConfig
from foliolm.core.errors import ConfigError

DEFAULT_MAX_NUM_SEQS = 256
STEP_SECONDS = 0.25
"""How long a step full of prefill may take when the user states no target: a gap that a reader of a stream bears."""
SMALLEST_BUDGET, LARGEST_BUDGET = 64, 8192


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler needs to know, all of it decided.

    Attributes:
        mode: ``static``, ``prefill-first``, ``mixed`` or ``chunked``.
        max_model_len: longest prompt plus output, tokens.
        block_size: tokens a KV block.
        num_blocks: KV blocks a group, the null block included.
        max_num_batched_tokens: new tokens a step.
        max_num_seqs: most requests in a step.
        long_prefill_token_threshold: more uncached tokens than this make a prompt long.
        short_prompt_share: share of the prefill budget that long prompts leave to short ones.
        scheduling_policy: ``fcfs``, ``priority`` or ``prefix``.
        age_bound_s: a request that waited so long comes before all others.
        fairness: requests of different tenants take turns by served tokens.
        ttft_target_s: one whose first token is predicted to take longer is refused at arrival; None: nobody is.
        watermark_blocks: blocks that an admission leaves free while something runs.
        max_queued_requests: most requests waiting.
        enable_prefix_caching: requests share the KV of what they have in common.
        num_host_blocks: slots of the host pool, each a block of every group; 0: there is none.
        preemption_mode: ``auto``, ``swap`` or ``recompute``.
        preemption_victim: ``auto``, ``last`` or ``least-computed``.
        max_preemptions: a request that gave way so often is spared while another can.
        kv_offloading: whether evicted prefix blocks live on in the host pool: ``auto`` (by price), ``always``, ``off``.
        max_loras: LoRA adapters that a step may use; None: any number.
        lora_grouping: ``arrival``, or ``cost``: requests whose adapter runs already come first.
    """

    mode: str = "chunked"
    max_model_len: int = 2048
    block_size: int = 16
    num_blocks: int = 1025
    max_num_batched_tokens: int = 512
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    long_prefill_token_threshold: int = 256
    short_prompt_share: float = 0.25
    scheduling_policy: str = "fcfs"
    age_bound_s: float = 60.0
    fairness: bool = False
    ttft_target_s: float | None = None
    watermark_blocks: int = 0
    max_queued_requests: int = 1024
    enable_prefix_caching: bool = False
    num_host_blocks: int = 0
    preemption_mode: str = "recompute"
    preemption_victim: str = "last"
    max_preemptions: int = 3
    kv_offloading: str = "off"
    max_loras: int | None = None
    lora_grouping: str = "arrival"

    @property
    def keeps_evicted(self) -> bool:
        """Whether evicted prefix blocks may live on in the host pool."""
        return self.enable_prefix_caching and self.num_host_blocks > 0 and self.kv_offloading != "off"


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings that follow from the model and the flags, before any weight is read.

    Attributes:
        max_model_len: tokens.
        max_num_seqs: requests.
        max_num_batched_tokens: tokens, or None where the device's rate decides.
        reasons: a sentence for each value that the user did not set.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    reasons: tuple[str, ...]


def resolve_limits(config: EngineConfig, model_max_len: int) -> Limits:
    """Check the flags against the model and each other; needs no weights.

    Chunking on: any budget of at least ``max_num_seqs`` is legal, above the context too (several prompts a step).
    Chunking off: an explicit budget below the context is an error; an unset one is raised to the context.

    Args:
        config: what the user set.
        model_max_len: longest context that the model was made for, tokens.

    Raises:
        ConfigError: with both numbers.
    """
    reasons = []
    max_model_len = config.max_model_len or model_max_len
    if config.max_model_len is None:
        reasons.append(f"max_model_len = {model_max_len}: the model's own limit")
    elif max_model_len > model_max_len:
        raise ConfigError(f"--max-model-len is {max_model_len}; the model was made for at most {model_max_len}")

    budget, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS, budget or DEFAULT_MAX_NUM_SEQS)
        why = "the default" if seqs == DEFAULT_MAX_NUM_SEQS else "no more than max_num_batched_tokens"
        reasons.append(f"max_num_seqs = {seqs}: {why}")
    if budget is not None and budget < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {budget}, below --max-num-seqs {seqs}: "
            "each running request needs one token of every step"
        )
    if config.mode != "chunked":
        if budget is None:
            budget = max_model_len + seqs
            reasons.append(
                f"max_num_batched_tokens = {budget}: prompts are computed whole ({config.mode}), so that the longest "
                f"({max_model_len}) must fit beside {seqs} decodes"
            )
        elif budget < max_model_len:
            raise ConfigError(
                f"--max-num-batched-tokens is {budget}, below --max-model-len {max_model_len}: with batching "
                f"{config.mode!r} a prompt is computed whole, and the longest would never fit; "
                "raise the budget, lower the length, or turn chunked prefill on"
            )
    return Limits(max_model_len, seqs, budget, tuple(reasons))


def default_budget(tokens_per_s: float, max_num_seqs: int) -> int:
    """Token budget for a device: the largest power of two that it prefills within ``STEP_SECONDS``.

    Args:
        tokens_per_s: measured or preset prefill rate of the model on the device.
        max_num_seqs: the budget is never below it.
    """
    budget = SMALLEST_BUDGET
    while budget * 2 <= tokens_per_s * STEP_SECONDS and budget < LARGEST_BUDGET:
        budget *= 2
    return max(budget, max_num_seqs)


def resolve_scheduler(
    config: EngineConfig, limits: Limits, num_blocks: int, tokens_per_s: float | None, num_host_blocks: int = 0
) -> tuple[SchedulerConfig, tuple[str, ...]]:
    """The scheduler's settings, and a sentence for each that was derived here.

    Args:
        config: what the user set.
        limits: from ``resolve_limits``.
        num_blocks: KV blocks a group, the null block included.
        tokens_per_s: prefill rate; needed only where ``limits`` leaves the budget open.
        num_host_blocks: slots of the host pool.

    Raises:
        ConfigError: the pool cannot hold one request of ``max_model_len``, or no rate was given and one is needed.
    """
    reasons = []
    capacity = (num_blocks - 1) * config.block_size
    if capacity < limits.max_model_len:
        raise ConfigError(
            f"the KV pool holds {num_blocks - 1} blocks of {config.block_size} = {capacity} tokens, fewer than "
            f"--max-model-len {limits.max_model_len}; the largest that fits is {capacity}"
        )
    budget = limits.max_num_batched_tokens
    if budget is None:
        if tokens_per_s is None:
            raise ConfigError("--max-num-batched-tokens is not set, and no prefill rate is known to derive it from")
        budget = default_budget(tokens_per_s, limits.max_num_seqs)
        reasons.append(
            f"max_num_batched_tokens = {budget}: at {tokens_per_s:,.0f} prefill tokens/s a full step takes about "
            f"{budget / tokens_per_s:.2f} s (aim {STEP_SECONDS} s, at least max_num_seqs)"
        )
    threshold = config.long_prefill_token_threshold
    if threshold is None:
        threshold = max(1, budget // 2)
        reasons.append(f"long_prefill_token_threshold = {threshold}: half the token budget")
    return (
        SchedulerConfig(
            mode=config.mode,
            max_model_len=limits.max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=limits.max_num_seqs,
            long_prefill_token_threshold=threshold,
            short_prompt_share=config.short_prompt_share,
            scheduling_policy=config.scheduling_policy,
            age_bound_s=config.age_bound,
            fairness=config.fairness != "off",
            ttft_target_s=None if config.ttft_target_ms is None else config.ttft_target_ms / 1e3,
            watermark_blocks=int(config.watermark * (num_blocks - 1)),
            max_queued_requests=config.max_queued_requests,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            preemption_mode=config.preemption_mode,
            preemption_victim=config.preemption_victim,
            max_preemptions=config.max_preemptions,
            kv_offloading=config.kv_offloading,
            max_loras=config.max_loras if config.enable_lora else None,
            lora_grouping=config.lora_grouping,
        ),
        tuple(reasons),
    )
