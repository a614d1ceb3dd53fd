"""A simulated or measured run, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPREADS = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "gap between tokens",
    "e2e_s": "whole request",
    "queue_s": "queue",
}
BOUND = {
    "arrivals": "nobody waited to speak of: the arrivals bound the run",
    "kv": "KV blocks bound it: requests waited for room in the pool (more memory, shorter requests, a smaller model)",
    "tokens": "the token budget bound it: prompts waited for a step with room (--max-num-batched-tokens)",
    "sequences": "the sequence cap bound it: requests waited for --max-num-seqs, not for the device",
}


def seconds(value: float | None) -> str:
    """A time with its unit; a dash where there is none."""
    if value is None:
        return "—"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.3g} s"


def print_outcome(numbers: Mapping[str, Any], model: str, device: str) -> None:
    """Print the numbers of one run."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(title=f"{model} on {device}", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for key, text in SPREADS.items():
        if key in numbers:
            table.add_row(text, *(seconds(value) for value in numbers[key].values()))
    console.print(table)
    console.print(_sentence(numbers), highlight=False, markup=False, soft_wrap=True)


def _sentence(numbers: Mapping[str, Any]) -> str:
    usage = numbers["kv_usage"]
    bound = BOUND.get(numbers["bound"], f"requests waited mostly because of {numbers['bound']}")
    return (
        f"{numbers['requests']:,} requests in {numbers['simulated_s']:,.1f} s of virtual time "
        f"({numbers['wall_s']:.2f} s here, {numbers['steps']:,} steps): {numbers['output_tokens_per_s']:,.0f} output "
        f"tokens/s, {numbers['requests_per_s']:.3g} requests/s. Prefix hits {numbers['prefix_hit_ratio']:.1%}, "
        f"{numbers['preemptions']:,} preemptions ({numbers['recomputed_tokens']:,} tokens computed again), KV pool "
        f"{usage['mean']:.0%} on average and {usage['max']:.0%} at most, {numbers['refused']:,} refused.\n{bound}."
        + (_adapters(numbers["lora"]) if "lora" in numbers else "")
    )


def _adapters(lora: Mapping[str, Any]) -> str:
    return (
        f"\nAdapters: {lora['adapters']:,}, of which a step has {lora['per_step']:.1f}; they take "
        f"{lora['step_share']:.1%} of those steps' time, were copied into slots {lora['loads']:,} times, and requests "
        f"were passed over for want of a slot {lora['passed_over']:,} times."
    )
