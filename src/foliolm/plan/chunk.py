"""What a prefill chunk does to running streams, and what chunking costs the prompt itself."""

from __future__ import annotations

import math
from typing import Any

from foliolm.ledger.treatments import Running, marginal_seconds, prefill_seconds, recompute_seconds
from foliolm.plan.checks import MOST_ROWS, real, whole
from foliolm.plan.report import Report, Table, count, rows, sentences, share, span
from foliolm.plan.setting import Setting

LARGEST_CHUNK = 2**20


def plan_chunk_at_rate(
    prefill_rate: float,
    prompt: int,
    chunk: int,
    itl_target_s: float | None = None,
    step_overhead_s: float = 0.0,
    ttft_target_s: float | None = None,
) -> Report:
    """Gaps of a chunked prompt at a measured prefill rate.

    ``worst_gap = min(chunk, prompt) / rate``; ``gaps = ceil(prompt / chunk)``.

    Args:
        prefill_rate: tokens a second.
        prompt, chunk: tokens.
        itl_target_s: the longest gap that running streams may see.
        step_overhead_s: seconds that each step costs beside its tokens (host, weights read again).
        ttft_target_s: also give the prompt tokens that may queue under it.

    Raises:
        ConfigError: a number is out of range.
    """
    real("prefill_rate", prefill_rate, above=True)
    real("step_overhead_s", step_overhead_s)
    _common(prompt, chunk, itl_target_s, ttft_target_s)
    gaps = -(-prompt // chunk)
    worst = min(chunk, prompt) / prefill_rate + step_overhead_s
    largest = None
    if itl_target_s is not None:
        largest = max(0, math.floor((itl_target_s - step_overhead_s) * prefill_rate + 1e-9))
    whole_s = prompt / prefill_rate + step_overhead_s
    chunked_s = prompt / prefill_rate + gaps * step_overhead_s
    return _report(prompt, chunk, prefill_rate, worst, gaps, largest, whole_s, chunked_s, itl_target_s, ttft_target_s)


def plan_chunk(
    setting: Setting,
    prompt: int,
    chunk: int,
    itl_target_s: float | None = None,
    running: int = 0,
    context: int = 2048,
    ttft_target_s: float | None = None,
) -> Report:
    """Gaps of a chunked prompt as the step cost predicts them.

    The worst gap is the whole step that holds the dearest chunk (the last full one, which attends to most), running
    decodes included. The TTFT cost is what the chunks take over one whole prefill: weights and the cached part's KV
    read again, and host time, each step.

    Args:
        setting: model and device.
        prompt, chunk: tokens.
        itl_target_s: the longest gap that running streams may see.
        running, context: decode rows in each step, and the context of each.
        ttft_target_s: also give the prompt tokens that may queue under it.

    Raises:
        ConfigError: a number is out of range, or no device was named.
    """
    _common(prompt, chunk, itl_target_s, ttft_target_s)
    whole("running", running, 0, MOST_ROWS)
    whole("context", context)
    cost = setting.cost
    decode_s = cost.decode_seconds(running, context)

    def worst_gap(size: int) -> float:
        beside = Running(running, context, size + running)
        size = min(size, prompt)
        return decode_s + max(marginal_seconds(cost, beside, size, done) for done in {0, max(0, prompt - size)})

    gaps = -(-prompt // chunk)
    whole_s = prefill_seconds(cost, prompt)
    chunked_s = recompute_seconds(cost, prompt, 0, Running(running, context, chunk + running)) + gaps * decode_s
    largest = None
    if itl_target_s is not None:
        low, high = 0, min(prompt, LARGEST_CHUNK) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if worst_gap(middle) <= itl_target_s else (low, middle)
        largest = low
    rate = prompt / whole_s
    worst = worst_gap(chunk)
    return _report(prompt, chunk, rate, worst, gaps, largest, whole_s, chunked_s, itl_target_s, ttft_target_s)


def gap_verdict(worst: float, gaps: int, chunk: int, largest: int | None, target: float | None) -> str:
    """Whether running streams keep their target, and which chunk would let them."""
    steps = "one step" if gaps == 1 else f"{gaps} steps"
    seen = f"While the prompt runs, each stream waits up to {span(worst)} a token, in {steps}"
    if target is None or largest is None:
        return f"{seen}."
    if worst <= target:
        return f"{seen}, within the target of {span(target)}; the largest chunk that keeps it is {count(largest)}."
    if largest == 0:
        return f"{seen}, and no chunk keeps the target of {span(target)}: serve fewer streams, or a faster device."
    return f"{seen}, over the target of {span(target)}: use a chunk of at most {count(largest)} (now {count(chunk)})."


def ttft_cost_verdict(cost_s: float, whole_s: float) -> str:
    """What chunking costs the prompt's own first token."""
    if cost_s <= 0:
        return "Chunking costs the prompt itself nothing at this rate."
    return (
        f"Chunking delays the prompt's own first token by {span(cost_s)} ({share(cost_s / whole_s)} of prefilling it "
        "whole and alone): it buys bounded gaps, not throughput."
    )


def _common(prompt: int, chunk: int, itl_target_s: float | None, ttft_target_s: float | None) -> None:
    whole("prompt", prompt)
    whole("chunk", chunk)
    if itl_target_s is not None:
        real("itl_target_s", itl_target_s, above=True)
    if ttft_target_s is not None:
        real("ttft_target_s", ttft_target_s, above=True)


def _report(
    prompt: int,
    chunk: int,
    rate: float,
    worst: float,
    gaps: int,
    largest: int | None,
    whole_s: float,
    chunked_s: float,
    itl_target_s: float | None,
    ttft_target_s: float | None,
) -> Report:
    numbers: dict[str, Any] = {
        "prompt": prompt,
        "chunk": chunk,
        "prefill_rate": rate,
        "worst_gap_s": worst,
        "gaps": gaps,
        "max_chunk_for_target": largest,
        "ttft_whole_s": whole_s,
        "ttft_chunked_s": chunked_s,
        "ttft_cost_s": chunked_s - whole_s,
    }
    queue = None
    if ttft_target_s is not None:
        numbers["queue_token_cap"] = math.floor(ttft_target_s * rate + 1e-9)
        queue = (
            f"To keep TTFT under {span(ttft_target_s)}, at most {count(numbers['queue_token_cap'])} prompt tokens may "
            "queue; refuse what comes beyond with Retry-After."
        )
    verdict = sentences(
        gap_verdict(worst, gaps, chunk, largest, itl_target_s), ttft_cost_verdict(chunked_s - whole_s, whole_s), queue
    )
    pairs = [
        ("prefill rate", f"{count(rate)} tokens/s"),
        ("worst gap of a running stream", span(worst)),
        ("gaps", count(gaps)),
        ("largest chunk for the target", "-" if largest is None else count(largest)),
        ("first token, prefilled whole and alone", span(whole_s)),
        ("first token, chunked", span(chunked_s)),
    ]
    title = f"A prompt of {count(prompt)} tokens in chunks of {count(chunk)}"
    return Report(numbers, verdict, (Table(title, ("what", "value"), rows(pairs)),))
