"""What decode reads a token: weights shared by the batch, KV not; the knee between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from foliolm.ledger.accounts import (
    ModelAccount,
    account,
    knee_batch,
    kv_bytes_of_context,
    read_per_output_token,
    ridge_batch,
    sequence_bytes,
    weight_bytes_per_step,
    weight_intensity,
    whole_bytes,
)
from foliolm.plan.checks import MOST_ROWS, whole, wholes
from foliolm.plan.report import Report, Table, count, sentences, share, size, span
from foliolm.plan.setting import MemoryOptions, Setting, memory_of


def plan_read(setting: Setting, context: int, batches: Sequence[int], options: MemoryOptions | None = None) -> Report:
    """Bytes read for each output token by batch: ``d(b, L) = D_w / b + L · k``.

    Args:
        setting: the model; a device adds seconds at full bandwidth and whether the pool holds the knee.
        context: L, tokens before each new one.
        batches: sequences a decode step.
        options: how the device's memory is shared out.

    Raises:
        ConfigError: a number is out of range.
    """
    whole("context", context, 0)
    wholes("batch", batches, 1, MOST_ROWS)
    model = setting.account
    rows = [_row(setting, model, context, batch) for batch in batches]
    for row in rows:
        row["throughput_gain"] = rows[0]["total_bytes"] / row["total_bytes"]
    knee = knee_batch(model, context)
    fits = _sequences_that_fit(setting, model, context, options or MemoryOptions())
    numbers: dict[str, Any] = {
        "model": setting.shape.name,
        "weight_bytes_per_step": whole_bytes(weight_bytes_per_step(model, batches[0])),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "context": context,
        "rows": rows,
        "ratio_first_to_last": rows[0]["total_bytes"] / rows[-1]["total_bytes"],
        "knee_batch": knee,
        "floor_bytes": whole_bytes(kv_bytes_of_context(model, context)),
    }
    if setting.device:
        numbers["device"] = setting.device.id
        numbers["sequences_that_fit"] = fits
        numbers["ridge_batch"] = ridge_batch(model, setting.device.bandwidth, setting.device.flops(model.compute))
    verdict = sentences(
        knee_verdict(knee, batches, numbers["floor_bytes"], context),
        doubling_verdict(rows),
        changed_weights_verdict(setting, model, context, batches[0]),
        pool_verdict(fits, knee, setting.device.id if setting.device else ""),
        ridge_verdict(numbers.get("ridge_batch"), fits),
    )
    return Report(numbers, verdict, (_table(setting, rows, context),))


def knee_verdict(knee: int | None, batches: Sequence[int], floor: int, context: int) -> str:
    """Which side of the knee the batches lie on."""
    if knee is None:
        return "No context is read, so weights alone bind: every doubling of the batch halves the bytes a token."
    last = batches[-1]
    if last >= knee:
        return (
            f"The knee is at batch {knee}: from there a bigger batch adds KV traffic almost one for one, and no batch "
            f"gets below {size(floor)} a token. At {last} KV binds: shorten the context ({count(context)} tokens) or "
            "shrink KV."
        )
    return (
        f"The knee is at batch {knee}; at {last} weights still bind: a bigger batch, or smaller weights, cuts the "
        f"bytes a token (the floor is {size(floor)})."
    )


def doubling_verdict(rows: Sequence[dict[str, Any]]) -> str | None:
    """How much of a doubled batch comes out as throughput; None where no two rows are a doubling."""
    for first, second in reversed(list(pairwise(rows))):
        if second["batch"] == 2 * first["batch"]:
            gain = first["total_bytes"] / second["total_bytes"]
            why = "not twice: each sequence reads its own KV" if gain < 1.995 else "as good as twice"
            pair = f"from {first['batch']} to {second['batch']}"
            return f"Doubling the batch {pair} yields {gain:.2f} times the tokens a second, {why}."
    return None


def changed_weights_verdict(setting: Setting, model: ModelAccount, context: int, batch: int) -> str | None:
    """What quantised or sharded weights and KV change against the model as stored on one device."""
    plain = account(setting.shape)
    before, after = weight_bytes_per_step(plain, batch), weight_bytes_per_step(model, batch)
    if before == after and plain.kv_bytes_per_token == model.kv_bytes_per_token:
        return None
    old, new = knee_batch(plain, context), knee_batch(model, context)
    return (
        f"Stored and split like this, a step reads {size(after)} of weights a device instead of {size(before)}, and "
        f"{size(model.kv_bytes_per_token)} of KV a token instead of {size(plain.kv_bytes_per_token)}: the knee moves "
        f"from batch {old} to {new}."
    )


def pool_verdict(fits: int | None, knee: int | None, device: str) -> str | None:
    """Whether the KV pool is full before the knee is reached."""
    if fits is None or knee is None:
        return None
    if fits <= 0:
        return f"The model does not fit {device} at all: quantise it or use more devices."
    if fits < knee:
        return (
            f"The pool of {device} is full at {fits} sequences, before the knee at {knee}: memory keeps the batch "
            "where weights bind; shrink KV or the context, or add memory."
        )
    return f"The pool of {device} holds {fits} sequences, so the knee at {knee} is within reach."


def ridge_verdict(ridge: int | None, fits: int | None) -> str | None:
    """Where compute, not memory, begins to bind the matrices; None where memory keeps the batch below that."""
    if ridge is None or (fits is not None and fits < ridge):
        return None
    return f"From batch {ridge} on, matrix products bind on compute instead of on reading weights."


def _row(setting: Setting, model: ModelAccount, context: int, batch: int) -> dict[str, Any]:
    weights = weight_bytes_per_step(model, batch)
    kv = kv_bytes_of_context(model, context)
    total = read_per_output_token(model, batch, context)
    row: dict[str, Any] = {
        "batch": batch,
        "weight_bytes": weights / batch,
        "kv_bytes": kv,
        "total_bytes": total,
        "kv_share": kv / total,
        "step_bytes": whole_bytes(weights + batch * kv),
        "kv_resident_bytes": whole_bytes(batch * kv),
        "intensity_flop_per_weight_byte": weight_intensity(model, batch),
    }
    if setting.device:
        row["read_s"] = (weights + batch * kv) / setting.device.bandwidth
        row["predicted_s"] = setting.cost.decode_seconds(batch, context)
    return row


def _sequences_that_fit(setting: Setting, model: ModelAccount, context: int, options: MemoryOptions) -> int | None:
    if setting.device is None:
        return None
    pool = memory_of(setting, options).kv_pool
    needed = sequence_bytes(model, max(1, context), setting.block_size)
    return max(0, pool) // needed


def _table(setting: Setting, rows: Sequence[dict[str, Any]], context: int) -> Table:
    columns = [
        "batch",
        "weights/token",
        "KV/token",
        "total/token",
        "KV share",
        "step reads",
        "KV resident",
        "FLOP/byte",
        "gain",
    ]
    if setting.device:
        columns += ["at full bandwidth", "predicted step"]
    cells = []
    for row in rows:
        line = [
            count(row["batch"]),
            size(row["weight_bytes"]),
            size(row["kv_bytes"]),
            size(row["total_bytes"]),
            share(row["kv_share"]),
            size(row["step_bytes"]),
            size(row["kv_resident_bytes"]),
            f"{row['intensity_flop_per_weight_byte']:.4g}",
            f"{row['throughput_gain']:.2f}×",
        ]
        if setting.device:
            line += [span(row["read_s"]), span(row["predicted_s"])]
        cells.append(tuple(line))
    title = f"{setting.shape.name}: bytes read for each output token at {count(context)} tokens of context"
    return Table(title, tuple(columns), tuple(cells))
