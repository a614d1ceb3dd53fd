"""What a device holds: the memory sum line by line, and how many sequences that is."""

from __future__ import annotations

from typing import Any

from foliolm.ledger.accounts import ModelAccount, sequence_bytes
from foliolm.plan.checks import MOST_ROWS, whole
from foliolm.plan.report import Report, Table, count, rows, sentences, size
from foliolm.plan.setting import Memory, MemoryOptions, Setting, memory_of
from foliolm.shape.formats import KV_BITS, kv_dtype


def plan_capacity(
    setting: Setting,
    context: int,
    options: MemoryOptions | None = None,
    max_num_seqs: int | None = None,
    wanted_sequences: int | None = None,
) -> Report:
    """Share out one device's memory and count the sequences of ``context`` tokens that fit.

    ``memory = weights + activations + reserve + kv_pool``; ``blocks = kv_pool / (p · k)``;
    ``sequences = min(max_num_seqs, kv_pool / bytes of a sequence in whole blocks)``.

    Args:
        setting: model and device. With tensor parallelism bytes are one device's, tokens and sequences the group's.
        context: tokens of each sequence.
        options: how the memory is shared out.
        max_num_seqs: cap on sequences a step, or None.
        wanted_sequences: also say how many such devices (or groups) hold this many.

    Raises:
        ConfigError: a number is out of range, or no device was named.
    """
    whole("context", context)
    if max_num_seqs is not None:
        whole("max_num_seqs", max_num_seqs, 1, MOST_ROWS)
    options = options or MemoryOptions()
    device, model = setting.need_device(), setting.account
    memory = memory_of(setting, options)
    pool = max(0, memory.kv_pool)
    blocks = pool // (model.kv_bytes_per_token * setting.block_size)
    by_memory = pool // sequence_bytes(model, context, setting.block_size)
    sequences = by_memory if max_num_seqs is None else min(max_num_seqs, by_memory)
    binds = "weights" if memory.kv_pool <= 0 else "kv" if sequences == by_memory else "sequences"
    numbers: dict[str, Any] = {
        "model": setting.shape.name,
        "device": device.id,
        "tensor_parallel_size": setting.tensor_parallel_size,
        "context": context,
        "memory_bytes": memory.memory,
        "weights_bytes": memory.weights,
        "activations_bytes": memory.activations,
        "reserve_bytes": memory.reserve,
        "kv_pool_bytes": memory.kv_pool,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "block_size": setting.block_size,
        "blocks": blocks,
        "tokens": blocks * setting.block_size,
        "sequences": sequences,
        "binds": binds,
        "largest_max_model_len": largest_max_model_len(setting, model, pool),
        "curve": _curve(setting, model, pool, context, max_num_seqs),
    }
    if wanted_sequences is not None:
        whole("wanted_sequences", wanted_sequences, 1, MOST_ROWS)
        numbers["groups_needed"] = -(-wanted_sequences // sequences) if sequences else None
    verdict = sentences(
        binds_verdict(numbers, memory, setting),
        context_verdict(numbers, setting),
        groups_verdict(numbers, wanted_sequences),
        utilization_verdict(options),
    )
    return Report(numbers, verdict, (_sum_table(numbers, memory, setting), _curve_table(numbers)))


def largest_max_model_len(setting: Setting, model: ModelAccount, pool: int) -> int:
    """The longest context of which one sequence fits the pool; never over what the model was made for."""
    low, high = 0, setting.shape.max_position_embeddings
    if sequence_bytes(model, high, setting.block_size) <= pool:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if sequence_bytes(model, middle, setting.block_size) <= pool:
            low = middle
        else:
            high = middle
    return low


def binds_verdict(numbers: dict[str, Any], memory: Memory, setting: Setting) -> str:
    """What keeps more sequences out, and what to change."""
    if numbers["binds"] == "weights":
        need = memory.weights + memory.activations + memory.reserve
        return (
            f"The weights do not fit: with activations and reserve they need {size(need)} of {size(memory.memory)}, "
            f"{size(-memory.kv_pool)} too much before any KV. Quantise them, or use more devices."
        )
    held = f"{count(numbers['sequences'])} sequences of {count(numbers['context'])} tokens"
    if numbers["binds"] == "sequences":
        return (
            f"The cap on sequences binds: the pool of {count(numbers['tokens'])} tokens would hold more than {held}; "
            "raise max_num_seqs, or let the sequences grow."
        )
    lever = _kv_lever(setting)
    return f"KV binds: {size(memory.kv_pool)} of pool is {count(numbers['tokens'])} tokens, {held}.{lever}"


def context_verdict(numbers: dict[str, Any], setting: Setting) -> str | None:
    """Whether one sequence of this context fits, and the model was made for it."""
    longest = numbers["largest_max_model_len"]
    if numbers["binds"] != "weights" and numbers["sequences"] == 0:
        asked = count(numbers["context"])
        return f"Not one sequence of {asked} tokens fits: the largest max_model_len is {count(longest)}."
    most = setting.shape.max_position_embeddings
    if numbers["context"] > most:
        return (
            f"The model's positions end at {count(most)}: a context of {count(numbers['context'])} needs RoPE scaling."
        )
    return None


def groups_verdict(numbers: dict[str, Any], wanted: int | None) -> str | None:
    """How many devices or groups the wanted sequences need."""
    if wanted is None:
        return None
    if numbers["groups_needed"] is None:
        return f"No number of them holds {count(wanted)} sequences, since one holds none."
    what = "devices" if numbers["tensor_parallel_size"] == 1 else f"groups of {numbers['tensor_parallel_size']} devices"
    groups = count(numbers["groups_needed"])
    return f"{count(wanted)} such sequences at once need {groups} {what}, each with its own weights."


def utilization_verdict(options: MemoryOptions) -> str | None:
    """A warning where nothing is left for what is not counted."""
    used = options.gpu_memory_utilization
    if used is None or used <= 0.95:
        return None
    return (
        f"A utilisation of {used:g} leaves next to nothing for driver context, communication buffers and "
        "fragmentation: stay at 0.95 or below."
    )


def _kv_lever(setting: Setting) -> str:
    if KV_BITS[kv_dtype(setting.shape, setting.kv_cache_dtype)] > 8:
        return " An 8-bit KV cache (--kv-cache-dtype fp8) doubles that; so does half the context."
    return " Half the context doubles that; so does a second device."


def _curve(setting: Setting, model: ModelAccount, pool: int, context: int, cap: int | None) -> list[dict[str, int]]:
    points = sorted(
        {max(1, context // 8), max(1, context // 4), max(1, context // 2), context, context * 2, context * 4}
    )
    curve = []
    for point in points:
        held = pool // sequence_bytes(model, point, setting.block_size)
        curve.append({"context": point, "sequences": held if cap is None else min(cap, held)})
    return curve


def _sum_table(numbers: dict[str, Any], memory: Memory, setting: Setting) -> Table:
    pairs = [
        ("memory", size(memory.memory)),
        ("− weights", size(memory.weights)),
        ("− activations (estimate)", size(memory.activations)),
        ("− reserve (not to be used, driver, graphs)", size(memory.reserve)),
        ("= KV pool", size(memory.kv_pool)),
        ("KV a token", size(numbers["kv_bytes_per_token"])),
        (f"blocks of {setting.block_size}", count(numbers["blocks"])),
        ("tokens", count(numbers["tokens"])),
        (f"sequences of {count(numbers['context'])}", count(numbers["sequences"])),
        ("largest max_model_len", count(numbers["largest_max_model_len"])),
    ]
    shared = f", one of {setting.tensor_parallel_size} devices" if setting.tensor_parallel_size > 1 else ""
    return Table(f"{setting.shape.name} on {numbers['device']}{shared}", ("line", "value"), rows(pairs))


def _curve_table(numbers: dict[str, Any]) -> Table:
    lines = tuple((count(one["context"]), count(one["sequences"])) for one in numbers["curve"])
    return Table("Sequences by context", ("tokens each", "sequences"), lines)
