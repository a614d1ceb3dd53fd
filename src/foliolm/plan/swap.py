"""Swap a request's KV to the host, or give it up and compute it again."""

from __future__ import annotations

from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.ledger.host_link import HostLink
from foliolm.ledger.treatments import Running, Turns, recompute_seconds, swap_seconds, turning_points
from foliolm.plan.checks import MOST_ROWS, real, whole
from foliolm.plan.report import Report, Table, count, rows, sentences, size, span
from foliolm.plan.setting import Setting


def plan_swap(
    setting: Setting,
    tokens: int,
    cached_tokens: int = 0,
    running: Running | None = None,
    ttft_target_s: float | None = None,
    copy_s: float = 5e-6,
    copies_per_block: int | None = None,
    overlap_s: float = 0.0,
) -> Report:
    """Price both treatments of a preempted request.

    Args:
        setting: model and device.
        tokens: tokens of the request whose KV has to go.
        cached_tokens: leading tokens that the prefix cache would give back on recomputation.
        running: what runs while it is brought back; None: 32 decodes at 1,024 tokens (a preemption needs a reason).
        ttft_target_s: the delay that may be spent; if neither treatment keeps it, the choice is ``refuse``.
        copy_s: seconds to start one copy.
        copies_per_block: copies that move one block; None: one a layer.
        overlap_s: seconds of copying that run under computation.

    Raises:
        ConfigError: a number is out of range, or no device was named.
    """
    whole("tokens", tokens)
    whole("cached_tokens", cached_tokens, 0)
    real("copy_s", copy_s)
    real("overlap_s", overlap_s)
    if copies_per_block is not None:
        whole("copies_per_block", copies_per_block)
    if cached_tokens >= tokens:
        raise ConfigError(f"cached_tokens is {cached_tokens}; it must be below tokens, {tokens}")
    if ttft_target_s is not None:
        real("ttft_target_s", ttft_target_s, above=True)
    running = running or Running(32, 1024, 8192)
    whole("running", int(running.batch), 0, MOST_ROWS)
    whole("context", int(running.context))
    whole("max_num_batched_tokens", running.max_num_batched_tokens)
    if running.max_num_batched_tokens <= running.batch:
        raise ConfigError(
            f"max_num_batched_tokens is {running.max_num_batched_tokens}; {running.batch} decodes leave no room for a "
            "chunk"
        )
    device, cost = setting.need_device(), setting.cost
    recompute = recompute_seconds(cost, tokens, cached_tokens, running)
    swap, turns = None, Turns(None, None)
    if device.host_link is not None:
        link = HostLink(device.host_link, setting.coefficients.link, copy_s, copies_per_block)
        swap = swap_seconds(cost.model, tokens, link, setting.block_size, overlap_s)
        longest = max(tokens, setting.shape.max_position_embeddings)
        turns = turning_points(cost, link, setting.block_size, cached_tokens, running, longest)
    choose = choose_treatment(swap, recompute, ttft_target_s)
    numbers: dict[str, Any] = {
        "model": setting.shape.name,
        "device": device.id,
        "tokens": tokens,
        "cached_tokens": cached_tokens,
        "swap_s": swap,
        "recompute_s": recompute,
        "choose": choose,
        "break_even_tokens": turns.break_even,
    }
    verdict = sentences(
        choice_verdict(swap, recompute, choose, tokens, ttft_target_s),
        turns_verdict(turns, swap, setting.block_size),
    )
    pairs = [
        ("KV to move", size(tokens * cost.model.kv_bytes_per_token)),
        ("swap, out and in", "no host link" if swap is None else span(swap)),
        ("recompute, marginal", span(recompute)),
        ("break-even", "-" if turns.break_even is None else f"{count(turns.break_even)} tokens"),
        ("choose", choose),
    ]
    title = f"{count(tokens)} tokens of {setting.shape.name} on {device.id}, {running.batch} decodes running"
    return Report(numbers, verdict, (Table(title, ("what", "value"), rows(pairs)),))


def choose_treatment(swap_s: float | None, recompute_s: float, ttft_target_s: float | None) -> str:
    """``swap``, ``recompute``, or ``refuse`` where neither keeps the target. A tie goes to swap: it computes "
    "nothing."""
    cheapest = recompute_s if swap_s is None else min(swap_s, recompute_s)
    if ttft_target_s is not None and cheapest > ttft_target_s:
        return "refuse"
    return "swap" if swap_s is not None and swap_s <= recompute_s else "recompute"


def choice_verdict(
    swap_s: float | None, recompute_s: float, choose: str, tokens: int, ttft_target_s: float | None
) -> str:
    """What to do and why."""
    if choose == "refuse":
        best = recompute_s if swap_s is None else min(swap_s, recompute_s)
        assert ttft_target_s is not None
        return (
            f"Refuse or degrade: the cheapest treatment takes {span(best)}, over the {span(ttft_target_s)} that may be "
            f"spent; admit less, so that {count(tokens)} tokens need not be preempted."
        )
    if swap_s is None:
        return f"Recompute, for {span(recompute_s)}: the device has no host link to swap over."
    if choose == "swap":
        return (
            f"Swap: moving {count(tokens)} tokens out and in takes {span(swap_s)}, computing them again beside what "
            f"runs {span(recompute_s)}."
        )
    return (
        f"Recompute: {count(tokens)} tokens cost {span(recompute_s)} beside what runs, less than the {span(swap_s)} of "
        "moving them out and in."
    )


def turns_verdict(turns: Turns, swap_s: float | None, block_size: int) -> str | None:
    """From which length the choice turns."""
    if swap_s is None:
        return None
    if turns.first is None:
        return "Swap is cheaper at every length: the link is fast beside the device's arithmetic."
    start = "Short contexts favour recompute"
    if turns.first > block_size:
        start = f"From {count(turns.first)} tokens recompute is cheaper"
    if turns.break_even is None:
        return f"{start}, up to the longest that the model takes."
    return (
        f"{start}, whose chunks run beside decodes that read the weights anyway; long ones, from "
        f"{count(turns.break_even)} tokens, favour swap, since attention grows with the square of the length."
    )
