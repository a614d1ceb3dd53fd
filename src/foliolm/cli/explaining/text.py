"""``foliolm explain`` for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from foliolm.ledger.adapter_account import AdapterAccount
from foliolm.ledger.explain import Explanation, OnHost, OperatingPoint, request_lines
from foliolm.ledger.reading import LedgerRun
from foliolm.ledger.roofline import UNKNOWN, Achieved
from foliolm.simulate.advice import Advice, Advised
from foliolm.simulate.grouping import Grouping

MEANINGS = {
    "http": "HTTP process and the way to and from the engine",
    "text": "templates, tokenising, detokenising",
    "queue": "waiting for the first step",
    "host": "between steps: planning, committing",
    "own_prefill": "computing its own prompt",
    "own_decode": "computing its own tokens",
    "recompute": "computing again what a preemption lost",
    "swap": "its KV, or others' in steps with it, on the way to the host or back",
    "others_prefill": "in steps with it, others' prompts",
    "others_decode": "in steps with it, others' tokens",
    "skipped": "left out of steps",
    "preempted": "without KV memory",
}
METRIC_NAMES = {
    "output_tokens_per_s": "tokens/s",
    "ttft_mean": "mean TTFT",
    "itl_p95": "95% of token gaps",
    "itl_p99": "99% of token gaps",
    "e2e_mean": "mean time of a request",
}


def print_run(
    run: LedgerRun, said: Explanation, advised: Advised | None, why_not: str, grouped: Grouping | None = None
) -> None:
    """The whole run."""
    console = _console()
    metrics = said.metrics
    console.print(
        f"[bold]{Path(said.model).name}[/bold]: {said.num_requests} requests, {said.num_steps} steps in "
        f"{metrics.makespan:.2f} s; "
        f"{metrics.output_tokens_per_s:.1f} tokens/s, mean TTFT {seconds_text(metrics.ttft_mean)}, "
        f"token gaps {seconds_text(metrics.itl_p50)} (median) and {seconds_text(metrics.itl_p95)} (95%)"
    )
    if said.num_torn:
        console.print(f"{said.num_torn} line cut off by a crash left out")
    table = _table("Where the requests' time went", "part", "seconds", "share", "what it is")
    total = sum(said.parts.values()) or 1.0
    for name, seconds in said.parts.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / total:.1%}", MEANINGS[name.partition(":")[0]])
    console.print(table)
    table = _table("Each request", "request", "tokens", "total", "largest parts")
    for record in run.requests:
        timeline = run.timelines.get(record.request_id)
        if timeline is None:
            continue
        largest = sorted(timeline.parts, key=lambda part: -part[1])[:3]
        shown = ", ".join(f"{name} {value / max(1, timeline.total_ns):.0%}" for name, value in largest)
        counts = f"{record.num_prompt_tokens}+{record.num_output_tokens}"
        table.add_row(
            f"{record.request_id} {record.label}".strip(), counts, seconds_text(timeline.total_ns / 1e9), shown
        )
        if table.row_count == 50 and len(run.requests) > 50:
            table.add_row("…", "", "", f"{len(run.requests) - 50} more: --json has all")
            break
    console.print(table)
    table = _table("Steps", "kind", "count", "seconds", "predicted", "median error")
    for kind, steps in said.kinds.items():
        error = f"{steps.median_ape:.1%}" if steps.predicted_s else "-"
        table.add_row(kind, str(steps.count), f"{steps.seconds:.3f}", f"{steps.predicted_s:.3f}", error)
    console.print(table)
    share = ", ".join(f"{name} {count / max(1, said.num_steps):.0%}" for name, count in sorted(said.closed.items()))
    console.print(
        f"in steps {said.busy_s:.2f} s, between them {said.host_s:.2f} s, idle {said.idle_s:.2f} s; "
        f"budgets closed by: {share}; preemptions: {said.preemptions}"
    )
    _print_gave_way(console, said)
    _print_on_host(console, said.on_host)
    if said.point is not None:
        _print_point(console, said.point)
    if said.lora is not None:
        _print_adapters(console, said.lora, grouped)
    _print_achieved(console, said)
    _print_slow(console, said)
    if advised is None:
        console.print(f"no advice: {why_not}")
    else:
        _print_advice(console, advised)


def print_request(run: LedgerRun, request_id: int) -> None:
    """One request."""
    console = _console()
    labels = {record.request_id: record.label for record in run.requests}
    record = next(one for one in run.requests if one.request_id == request_id)
    timeline = run.timelines[request_id]
    table = _table(
        f"request {request_id} {record.label}: {record.num_prompt_tokens} + {record.num_output_tokens} tokens, "
        f"{record.finish_reason}, {seconds_text(timeline.total_ns / 1e9)}",
        "part",
        "ms",
        "share",
        "what it is",
    )
    for name, seconds, share in request_lines(timeline, labels):
        table.add_row(name, f"{seconds * 1e3:.3f}", f"{share:.1%}", MEANINGS.get(name.partition(":")[0], ""))
    console.print(table)


def _print_gave_way(console: Console, said: Explanation) -> None:
    if not said.gave_way:
        return
    counts = ", ".join(f"{name} {count}" for name, count in sorted(said.treatments.items()))
    moved = f"; {said.swapped_bytes / 1e6:.1f} MB moved to the host or back" if said.swapped_bytes else ""
    title = f"Who gave way, and how ({counts}{moved})"
    table = _table(title, "request", "step", "treatment", "swap", "recompute", "what for")
    shown = said.gave_way[-10:]
    for one in shown:
        blocks = f"request {one.blocker} needed {one.needed} blocks, {one.available} were free"
        costs = ["-" if cost is None else seconds_text(cost) for cost in (one.swap_s, one.recompute_s)]
        table.add_row(str(one.request_id), str(one.step_id), one.treatment.replace("_", " "), *costs, blocks)
    if said.preemptions > len(shown):
        table.add_row("…", "", "", "", "", f"{said.preemptions - len(shown)} more before")
    console.print(table)


def _print_on_host(console: Console, on_host: OnHost) -> None:
    if not on_host.moved_blocks and not on_host.loaded_blocks:
        return
    taken = ""
    if on_host.requests:
        taken = (
            f"; {on_host.requests} requests took {on_host.loaded_blocks} blocks back: their prompts were predicted to "
            f"take {seconds_text(on_host.copy_s)} so, and {seconds_text(on_host.compute_s)} computed"
        )
    declined = f"; for {on_host.declined} it was cheaper to compute" if on_host.declined else ""
    console.print(f"evicted prefixes: {on_host.moved_blocks} blocks moved to the host{taken}{declined}")


def _print_adapters(console: Console, lora: AdapterAccount, grouped: Grouping | None) -> None:
    console.print(
        f"adapters cost {lora.share:.1%} of step time: {lora.adapters} of them, {lora.per_step:.1f} in a step with "
        f"{lora.rows_per_adapter:.1f} rows each; they read {lora.read_bytes / 1e6:,.1f} MB and added "
        f"{lora.flops / 1e9:,.1f} GFLOP, the KV of those steps was {lora.kv_bytes / 1e6:,.1f} MB; copied into "
        f"slots {lora.loads} times; passed over for want of a slot {lora.passed_over} times"
    )
    if grouped is not None:
        console.print(
            f"grouping (--lora-grouping cost) would save {grouped.saved_share:.1%} of step time: "
            f"{grouped.per_step[0]:.1f} adapters a step become {grouped.per_step[1]:.1f}; "
            + ", ".join(f"{METRIC_NAMES[name]} {change:+.0%}" for name, change in grouped.effect.items())
        )


def _print_point(console: Console, point: OperatingPoint) -> None:
    knee = "there is no knee" if point.knee is None else f"the knee is at {point.knee}"
    where = ""
    if point.knee is not None:
        where = " (before it: a bigger batch is almost free)" if point.batch < point.knee else " (past it)"
    console.print(
        f"the average decode step: {point.batch:.1f} rows at {point.context:.0f} tokens of context reads "
        f"{point.weight_bytes / 1e6:.1f} MB of weights and {point.kv_bytes / 1e6:.1f} MB of KV, "
        f"{point.bytes_per_token / 1e6:.2f} MB a token; {knee}{where}, the floor is "
        f"{point.floor_bytes / 1e6:.2f} MB a token"
    )


def _print_achieved(console: Console, said: Explanation) -> None:
    if not said.achieved:
        return
    title = "How near the machine's limits, inside the model's calls (medians)"
    table = _table(title, "kind", "count", "GB/s", "of limit", "GFLOP/s", "of limit", "binds", "by the clock")
    for one in said.achieved:
        table.add_row(one.kind, str(one.steps), *achieved_cells(one))
    console.print(table)
    for words in dict.fromkeys(one.words for one in said.achieved):  # all decodes may have been of one sequence
        console.print(words)
    if said.limits is None:
        console.print(UNKNOWN)
        return
    console.print(said.limits.describe())
    if said.bandwidth_share is not None and said.flops_share is not None:
        console.print(
            f"all steps together: {said.bandwidth_share:.0%} of its memory bandwidth, {said.flops_share:.0%} of its "
            "FLOP/s"
        )


def achieved_cells(one: Achieved) -> tuple[str, ...]:
    """GB/s, share, GFLOP/s, share, the limit that binds, and the share of it by the clock."""
    wall = one.wall_bandwidth_share if one.binds == "bandwidth" else one.wall_flops_share
    shares = ["-" if share is None else f"{share:.0%}" for share in (one.bandwidth_share, one.flops_share, wall)]
    rates = f"{one.read_gb_per_s:,.1f}", f"{one.gflop_per_s:,.1f}"
    return rates[0], shares[0], rates[1], shares[1], one.binds or "-", shares[2]


def _print_slow(console: Console, said: Explanation) -> None:
    if not said.slow:
        return
    table = _table("Slowest against prediction", "step", "kind", "rows", "tokens", "took", "predicted")
    for step in said.slow:
        table.add_row(
            str(step.step_id),
            step.kind,
            str(step.rows),
            str(step.tokens),
            seconds_text(step.seconds),
            seconds_text(step.predicted_s),
        )
    console.print(table)


def _print_advice(console: Console, advised: Advised) -> None:
    if not advised.advice:
        console.print(f"nothing to change: none of {advised.tried} changes that were run again gains 10%")
        return
    table = _table("What to change (each run again with the recorded arrivals)", "change", "predicted effect", "needs")
    for one in advised.advice:
        table.add_row(one.flags, effect_text(one), one.needs)
    console.print(table)


def effect_text(advice: Advice) -> str:
    """The change of each metric, the goal first."""
    names = sorted(advice.effect, key=lambda name: name != advice.goal)
    return ", ".join(f"{METRIC_NAMES[name]} {advice.effect[name]:+.0%}" for name in names)


LEFT_ALIGNED = frozenset(
    ("part", "request", "what it is", "largest parts", "kind", "change", "predicted effect", "needs", "step", "binds")
) | {"treatment", "what for"}


def _console() -> Console:
    """Wide enough for the tables where the output is a file or a pipe, whose width nobody knows."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT_ALIGNED else "right")
    return table


def seconds_text(seconds: float) -> str:
    """Seconds or milliseconds, as people read them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
