"""What adapters take: memory beside the KV, and bytes a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import lora_params, sequence_bytes, weight_bytes_per_step
from foliolm.plan.checks import MOST_ROWS, whole
from foliolm.plan.report import Report, Table, count, rows, sentences, share, size
from foliolm.plan.setting import MemoryOptions, Setting, memory_of


def plan_lora(
    setting: Setting,
    rank: int,
    targets: Sequence[str],
    adapters: int,
    sequences: int,
    context: int,
    batch: int | None = None,
    distinct: int | None = None,
    options: MemoryOptions | None = None,
) -> Report:
    """Bytes of adapters against bytes of KV, and what a step reads of adapters.

    An adapter holds ``Σ rank · (in + out)`` values over its targets, in 16 bits.

    Args:
        setting: the model; with a device also whether all of it fits.
        rank: of every adapter.
        targets: names of linears.
        adapters: adapters resident at once.
        sequences: sequences resident at once.
        context: tokens of each.
        batch: rows of a step; None: all sequences.
        distinct: adapters that the step's rows use; None: as many as there can be.
        options: how the device's memory is shared out.

    Raises:
        ConfigError: a number is out of range, or an unknown target.
    """
    whole("adapters", adapters, 1, MOST_ROWS)
    whole("sequences", sequences, 1, MOST_ROWS)
    whole("context", context)
    rows_a_step = sequences if batch is None else whole("batch", batch, 1, MOST_ROWS)
    most = min(adapters, rows_a_step)
    used = most if distinct is None else whole("distinct", distinct, 1, MOST_ROWS)
    if used > most:
        raise ConfigError(f"distinct is {used}; {rows_a_step} rows of {adapters} adapters use at most {most}")
    params = lora_params(setting.shape, rank, tuple(targets))
    model = setting.account
    adapter_bytes = 2 * params
    kv_bytes = sequences * sequence_bytes(model, context, 1)
    weights = weight_bytes_per_step(model, rows_a_step)
    numbers: dict[str, Any] = {
        "model": setting.shape.name,
        "rank": rank,
        "targets": list(targets),
        "adapter_bytes": adapter_bytes,
        "adapters_bytes": adapters * adapter_bytes,
        "kv_bytes": kv_bytes,
        "binds": "kv" if kv_bytes >= adapters * adapter_bytes else "adapters",
        "batch": rows_a_step,
        "distinct": used,
        "rows_per_adapter": rows_a_step / used,
        "adapter_bytes_per_step": used * adapter_bytes,
        "step_bytes_share": used * adapter_bytes / weights,
        "flops_share": params / model.active_body_params,
        "kv_tokens_displaced": adapters * adapter_bytes // model.kv_bytes_per_token,
    }
    if setting.device:
        pool = memory_of(setting, options or MemoryOptions()).kv_pool
        numbers["kv_pool_bytes"] = pool
        numbers["fits"] = kv_bytes + adapters * adapter_bytes <= pool
        bare = setting.cost.decode_counts(rows_a_step, context)
        adapted = replace(bare, lora_bytes=used * adapter_bytes, lora_flops=2.0 * params * rows_a_step)
        terms = setting.cost.terms(adapted)
        numbers["step_s"], numbers["step_lora_s"] = terms.total, terms.lora
    verdict = sentences(
        binds_verdict(numbers),
        fit_verdict(numbers, setting.device.id if setting.device else ""),
        step_verdict(numbers),
    )
    pairs = [
        ("one adapter", size(adapter_bytes)),
        (f"{count(adapters)} adapters", size(adapters * adapter_bytes)),
        (f"KV of {count(sequences)} × {count(context)} tokens", size(kv_bytes)),
        ("KV tokens that the adapters displace", count(numbers["kv_tokens_displaced"])),
        ("rows for each adapter in a step", f"{numbers['rows_per_adapter']:.3g}"),
        ("adapter bytes a step", f"{size(used * adapter_bytes)} ({share(numbers['step_bytes_share'])} of the weights)"),
        ("added FLOPs", share(numbers["flops_share"])),
    ]
    if "step_s" in numbers:
        pairs.append(
            (
                "decode step, of it adapters",
                f"{numbers['step_s'] * 1e3:.3g} ms, {share(numbers['step_lora_s'] / numbers['step_s'])}",
            )
        )
    title = f"LoRA of rank {rank} on {', '.join(targets)} of {setting.shape.name}"
    return Report(numbers, verdict, (Table(title, ("what", "value"), rows(pairs)),))


def binds_verdict(numbers: dict[str, Any]) -> str:
    """Which of adapters and KV takes the memory."""
    adapters, kv = numbers["adapters_bytes"], numbers["kv_bytes"]
    if numbers["binds"] == "kv":
        return (
            f"The adapters fit in {size(adapters)} while KV binds: it takes {size(kv)}, {kv / adapters:.3g} times as "
            "much; shorten the context or shrink KV before dropping adapters."
        )
    return (
        f"The adapters bind: they take {size(adapters)}, {adapters / max(1, kv):.3g} times the KV's {size(kv)}; keep "
        "fewer on the device, or lower the rank."
    )


def fit_verdict(numbers: dict[str, Any], device: str) -> str | None:
    """Whether both fit beside the weights."""
    if "fits" not in numbers:
        return None
    need, pool = numbers["adapters_bytes"] + numbers["kv_bytes"], numbers["kv_pool_bytes"]
    if numbers["fits"]:
        return f"Both fit the {size(pool)} that {device} has left beside the weights."
    return f"Together they need {size(need)}, but {device} has {size(max(0, pool))} left beside the weights."


def step_verdict(numbers: dict[str, Any]) -> str:
    """What a step pays for its distinct adapters."""
    return (
        f"A step whose {numbers['batch']} rows use {numbers['distinct']} adapters reads "
        f"{size(numbers['adapter_bytes_per_step'])} of them ({share(numbers['step_bytes_share'])} of the weights) and "
        f"adds {share(numbers['flops_share'])} to the FLOPs: a greater loss than that is overhead, not arithmetic."
    )
