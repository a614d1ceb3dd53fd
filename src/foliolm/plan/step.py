"""One step, predicted term by term, and what padding it to a bucket costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import (
    kv_bytes_of_context,
    linear_flops,
    prefill_attention_flops,
    weight_bytes_per_step,
    whole_bytes,
)
from foliolm.ledger.step_cost import StepTerms
from foliolm.plan.checks import MOST_ROWS, whole, wholes
from foliolm.plan.report import Report, Table, count, sentences, share, span
from foliolm.plan.setting import Setting


def plan_step(
    setting: Setting,
    decodes: int,
    context: int,
    prefills: Sequence[tuple[int, int]] = (),
    buckets: Sequence[int] = (),
) -> Report:
    """Predicted seconds of one step by term.

    Args:
        setting: model and device.
        decodes, context: decode rows, and tokens before the new one of each.
        prefills: (new, cached) tokens of each prefill chunk.
        buckets: batch sizes of captured graphs. A step of decodes alone is padded to the smallest that holds it; with
            prefill in the step, or over the largest bucket, nothing is padded.

    Raises:
        ConfigError: a number is out of range, the step is empty, or no device was named.
    """
    whole("decodes", decodes, 0, MOST_ROWS)
    whole("context", context, 0)
    for new, cached in prefills:
        whole("prefill's new tokens", new)
        whole("prefill's cached tokens", cached, 0)
    if decodes == 0 and not prefills:
        raise ConfigError("decodes is 0 and prefill is empty; the step has nothing to do")
    if buckets:
        wholes("buckets", buckets, 1, MOST_ROWS)
    bucket = None if prefills else min((size for size in buckets if size >= decodes), default=None)
    cost, model = setting.cost, setting.account
    bare_counts = cost.counts([context] * decodes, prefills)
    counts = cost.counts([context] * decodes, prefills, padded_decodes=bucket)
    bare, terms = cost.terms(bare_counts), cost.terms(counts)
    attention = sum(prefill_attention_flops(model, new, cached) for new, cached in prefills)
    numbers: dict[str, Any] = {
        "model": setting.shape.name,
        "device": setting.need_device().id,
        "tokens": bare_counts.new_tokens,
        "padded_tokens": counts.new_tokens,
        "bucket": bucket,
        "total_s": terms.total,
        "terms": terms.parts(),
        "weight_read_s": terms.weight_read,
        "matmul_s": terms.matmul,
        "padding_s": terms.total - bare.total,
        "binds": terms.binds,
        "weight_bytes": whole_bytes(weight_bytes_per_step(model, counts.new_tokens)),
        "kv_bytes": whole_bytes(
            decodes * kv_bytes_of_context(model, context)
            + sum(kv_bytes_of_context(model, cached) for _, cached in prefills)
        ),
        "linear_flops": linear_flops(model, counts.new_tokens, counts.sampled),
        "attention_flops": attention,
    }
    verdict = sentences(
        binds_verdict(terms, len(prefills)), padding_verdict(numbers["padding_s"], bare.total, decodes, bucket)
    )
    lines = [(name.replace("_", " "), span(value), share(value / terms.total)) for name, value in terms.parts().items()]
    lines.append(("total", span(terms.total), "100 %"))
    title = f"A step of {decodes} decodes at {count(context)} tokens and {len(prefills)} prefill chunks"
    return Report(numbers, verdict, (Table(title, ("term", "time", "share"), tuple(lines)),))


def binds_verdict(terms: StepTerms, chunks: int) -> str:
    """Where most of the step's time goes, and what to change."""
    change = {
        "bandwidth": "reading weights and KV binds; a bigger batch shares the weights, smaller formats shrink both",
        "compute": "arithmetic binds; a smaller chunk shortens the step, and only fewer tokens the whole",
        "host": "host time binds, not the device; capture the step as a graph, or put more work into it",
        "link": "the exchange between devices binds; use fewer of them for each replica",
    }[terms.binds]
    largest, seconds = max(terms.parts().items(), key=lambda item: item[1])
    name = largest.replace("_", " ")
    return f"The step takes {span(terms.total)}, {share(seconds / terms.total)} of it in {name}: {change}."


def padding_verdict(padding_s: float, bare_s: float, decodes: int, bucket: int | None) -> str | None:
    """What padding to a bucket costs."""
    if bucket is None:
        return None
    if bucket == decodes:
        return f"The bucket of {bucket} fits: nothing is padded."
    return f"Padding {decodes} rows to the bucket of {bucket} costs {span(padding_s)} ({share(padding_s / bare_s)})."
