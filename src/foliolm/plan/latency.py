"""A request's latency from its parts, and what measured times say about the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import linear_flops, read_per_output_token
from foliolm.ledger.treatments import Running, prefill_seconds, recompute_seconds
from foliolm.plan.checks import MOST_ROWS, needed, real, whole
from foliolm.plan.report import Report, Table, in_words, rows, sentences, share, span
from foliolm.plan.setting import Setting


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of a request; None where they are to be predicted.

    Attributes:
        prefill_s: from the start of its prefill to its first token.
        itl_s: mean gap between tokens.
    """

    prefill_s: float | None = None
    itl_s: float | None = None


def plan_latency(
    output_tokens: int,
    queue_s: float = 0.0,
    measured: Measured | None = None,
    setting: Setting | None = None,
    input_tokens: int | None = None,
    batch: int = 1,
    max_num_batched_tokens: int | None = None,
) -> Report:
    """Time to first token, decode time and end-to-end time.

    ``ttft = queue + prefill``; ``decode = (output_tokens − 1) · itl`` (the prefill yields the first token);
    ``e2e = ttft + decode``.

    Args:
        output_tokens: tokens of the answer.
        queue_s: seconds before its prefill starts.
        measured: measured times; what is None is predicted from ``setting``.
        setting: the model, and the device where anything is predicted or judged.
        input_tokens: tokens of the prompt; needed with a model.
        batch: decode rows in each step, this request included.
        max_num_batched_tokens: chunk the prefill by this budget, beside the other decodes; None: whole and alone.

    Raises:
        ConfigError: a number is out of range, or neither measured nor predictable.
    """
    measured = measured or Measured()
    whole("output_tokens", output_tokens)
    whole("batch", batch, 1, MOST_ROWS)
    real("queue_s", queue_s)
    for name in ("prefill_s", "itl_s"):
        if getattr(measured, name) is not None:
            real(name, getattr(measured, name), above=True)
    if setting is not None:
        needed("input_tokens", input_tokens, "with a model the prompt's length is needed")
    context = 0 if input_tokens is None else whole("input_tokens", input_tokens)
    prefill, itl = measured.prefill_s, measured.itl_s
    alone = chunks = None
    if prefill is None:
        needed("prefill_s", setting, "give it, or a model and a device to predict it")
        assert setting is not None
        prefill, alone, chunks = _predicted_prefill(setting, context, batch, max_num_batched_tokens)
    if itl is None:
        needed("itl_s", setting, "give it, or a model and a device to predict it")
        assert setting is not None
        itl = setting.cost.decode_seconds(batch, context + output_tokens / 2)
    ttft = queue_s + prefill
    decode = (output_tokens - 1) * itl
    numbers: dict[str, Any] = {
        "queue_s": queue_s,
        "prefill_s": prefill,
        "itl_s": itl,
        "output_tokens": output_tokens,
        "ttft_s": ttft,
        "decode_s": decode,
        "e2e_s": ttft + decode,
    }
    judged = None
    if setting is not None and setting.device is not None and measured != Measured():
        judged = _judge(setting, measured, context, batch, numbers)
    verdict = sentences(judged, ttft_verdict(queue_s, prefill, alone, chunks), largest_part(ttft, decode))
    pairs = [
        ("queue", span(queue_s)),
        ("prefill", span(prefill)),
        ("time to first token", span(ttft)),
        ("gap between tokens", span(itl)),
        ("decode", span(decode)),
        ("end to end", span(ttft + decode)),
    ]
    return Report(numbers, verdict, (Table("A request's time", ("part", "time"), rows(pairs)),))


def decode_verdict(bandwidth_share: float, device: str, batch: int) -> str:
    """What the share of the bandwidth that decode reached says of what sets the pace."""
    if bandwidth_share > 1.0:
        return (
            f"Decode would have read {share(bandwidth_share)} of {device}'s bandwidth, which cannot be: the model, its "
            "number format or the device differs from the one measured."
        )
    if bandwidth_share >= 0.6:
        return (
            f"Decode ran at {share(bandwidth_share)} of {device}'s bandwidth: memory sets the pace; read less (smaller "
            "weights or KV), or serve more requests a step."
        )
    return (
        f"Decode ran at {in_words(bandwidth_share)} of {device}'s bandwidth ({share(bandwidth_share)}), so memory does "
        "not set the pace: host overhead between kernels does, most likely. Capture the step as a graph or plan the "
        f"next step while one runs{'' if batch > 1 else '; a bigger batch costs next to nothing here'}."
    )


def prefill_verdict(flops_share: float, device: str) -> str:
    """What the share of the peak FLOP/s that prefill reached says."""
    if flops_share > 1.0:
        return (
            f"Prefill would have computed at {share(flops_share)} of {device}'s peak, which cannot be: part of the "
            "prompt was cached, or the model or device differs from the one measured."
        )
    if flops_share >= 0.4:
        return f"Prefill ran at {share(flops_share)} of its peak FLOP/s: compute binds it; only fewer tokens help."
    why = "the prompt is too short, or chunked too fine, to fill it"
    return f"Prefill ran at {share(flops_share)} of its peak FLOP/s: {why}."


def ttft_verdict(queue_s: float, prefill_s: float, alone_s: float | None, chunks: int | None) -> str | None:
    """What time to first token holds beside the bare prefill."""
    parts = []
    if queue_s > 0:
        parts.append(f"{span(queue_s)} of queue ({share(queue_s / (queue_s + prefill_s))})")
    if alone_s is not None and chunks is not None and prefill_s > alone_s * 1.001:
        parts.append(f"{span(prefill_s - alone_s)} for going in {chunks} chunks beside running decodes")
    if not parts:
        return None
    bare = prefill_s if alone_s is None else alone_s
    return f"TTFT is not prefill alone: beside {span(bare)} of prefill it holds {' and '.join(parts)}."


def largest_part(ttft: float, decode: float) -> str:
    """Which of the two to cut first."""
    total = ttft + decode
    if decode >= ttft:
        return f"Decode takes {share(decode / total)} of the whole: cut the gap between tokens, or the answer's length."
    return f"The first token takes {share(ttft / total)} of the whole: cut the queue, or the prompt (a cached prefix)."


def _predicted_prefill(
    setting: Setting, tokens: int, batch: int, budget: int | None
) -> tuple[float, float, int | None]:
    """Seconds of prefill as it runs, alone and whole, and in how many chunks."""
    cost = setting.cost
    alone = prefill_seconds(cost, tokens)
    if budget is None:
        return alone, alone, None
    whole("max_num_batched_tokens", budget)
    others = batch - 1
    if budget <= others:
        raise ConfigError(f"max_num_batched_tokens is {budget}; {others} decodes leave no room for a prefill chunk")
    running = Running(others, tokens, budget)
    chunks = -(-tokens // running.chunk)
    steps = recompute_seconds(cost, tokens, 0, running)
    return steps + chunks * cost.decode_seconds(others, tokens), alone, chunks


def _judge(setting: Setting, measured: Measured, context: int, batch: int, numbers: dict[str, Any]) -> str:
    """Compare measured times with the device's rates; adds the shares to ``numbers``."""
    device, model = setting.need_device(), setting.account
    said = []
    if measured.itl_s is not None:
        # The context at the first token: a little less than what was read, so the share is a lower bound.
        read = batch * read_per_output_token(model, batch, context) / measured.itl_s
        numbers["decode_read_bytes_per_s"] = read
        numbers["decode_bandwidth_share"] = read / device.bandwidth
        said.append(decode_verdict(numbers["decode_bandwidth_share"], device.id, batch))
    if measured.prefill_s is not None:
        # The matrices of the layers alone: the head is computed for one row, attention is left out.
        computed = linear_flops(model, context, 0) / measured.prefill_s
        numbers["prefill_flops_per_s"] = computed
        numbers["prefill_flops_share"] = computed / device.flops(model.compute)
        said.append(prefill_verdict(numbers["prefill_flops_share"], device.id))
    return sentences(*said)
