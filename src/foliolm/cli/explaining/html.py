"""A run as a report of one self-contained HTML file."""

from __future__ import annotations

from html import escape
from pathlib import Path

from foliolm.cli.explaining.charts import dot, frame, label, path, rect, short, x_axis, y_axis
from foliolm.cli.explaining.text import MEANINGS, achieved_cells, effect_text, seconds_text
from foliolm.core.machine import MachineLimits
from foliolm.core.record import StepRecord
from foliolm.ledger.explain import Explanation, bytes_curve
from foliolm.ledger.reading import LedgerRun
from foliolm.ledger.roofline import UNKNOWN
from foliolm.simulate.advice import Advised

BINS = 215
MOST_REQUESTS = 60
MOST_DOTS = 1500
KINDS = ("prefill", "mixed", "decode")

STYLE = """
:root{--ink:#1d2430;--soft:#667085;--line:#e3e7ee;--page:#f7f8fa;--card:#fff;--decode:#2f6fde;--mixed:#8a5cd6;
--prefill:#e08a1e;--queue:#c9ced8;--host:#8b95a5;--others:#b9a5e6;--waste:#d64545;--good:#2f9e6e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#2b3340;--page:#12161d;--card:#1a202a;
--queue:#4a5362;--host:#6c7686;--others:#6d58a8} }
*{box-sizing:border-box} body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5
system-ui,sans-serif}
main{max-width:940px;margin:0 auto;padding:28px 20px 60px} h1{font-size:24px;margin:0 0 2px}
h2{font-size:17px;margin:0 0 4px}
p{margin:4px 0 10px;color:var(--soft)} section{background:var(--card);border:1px solid
var(--line);border-radius:10px;
padding:18px 20px;margin:16px 0} svg{width:100%;height:auto;display:block} .grid{stroke:var(--line)}
.tick,.name,.note{font-size:11px;fill:var(--soft)} .note{fill:var(--ink);font-size:12px}
.decode,.own_decode{fill:var(--decode)} .mixed{fill:var(--mixed)} .prefill,.own_prefill{fill:var(--prefill)}
.queue,.skipped{fill:var(--queue)} .host,.http,.text{fill:var(--host)} .others_prefill{fill:#f0c48a}
.others_decode{fill:#9dbcf2} .preempted,.recompute{fill:var(--waste)}
.curve{fill:none;stroke:var(--decode);stroke-width:2}
.rule{stroke:var(--soft);stroke-dasharray:4 4;fill:none} .point{fill:var(--waste)} .faint{opacity:.45}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin-top:14px}
.figure b{display:block;font-size:20px;color:var(--ink)} .figure{color:var(--soft);font-size:13px}
table{border-collapse:collapse;width:100%;font-size:14px} td,th{text-align:left;padding:5px
8px;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums} code{font-size:13px}
.legend{font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 12px}
"""
COLOURS = {
    "decode": "var(--decode)",
    "mixed": "var(--mixed)",
    "prefill": "var(--prefill)",
    "own_prefill": "var(--prefill)",
    "own_decode": "var(--decode)",
    "others_prefill": "#f0c48a",
    "others_decode": "#9dbcf2",
    "queue": "var(--queue)",
    "skipped": "var(--queue)",
    "host": "var(--host)",
    "http": "var(--host)",
    "text": "var(--host)",
    "preempted": "var(--waste)",
    "recompute": "var(--waste)",
}


def report(run: LedgerRun, said: Explanation, advised: Advised | None) -> str:
    """The file's text."""
    sections = [
        _section("When the engine did what", "Share of each slice of time in steps of each kind.", _timeline(run)),
        _section("What a step held", "Mean decode rows, and prompt tokens, of the steps in each slice.", _batch(run)),
        _section(
            "Where each request's time went",
            "From accept to the last byte; the parts of a bar sum to the whole. Hover for milliseconds.",
            _requests(run),
        ),
        _section("In all", "", _parts(said)),
        _section(
            "Predicted against measured",
            "A dot a step; on the line the prediction was right. Dots far above it were interrupted.",
            _scatter(run.steps),
        ),
    ]
    if said.achieved:
        sections.append(_section("How near the machine's limits", _limit_words(said), _achieved(run, said)))
    if said.point is not None and run.cost is not None:
        sections.append(_section("Bytes read for each token", _point_words(said), _curve(run, said)))
    if advised is not None:
        sections.append(
            _section("What to change", f"{advised.tried} changes were run again in virtual time.", _advice(advised))
        )
    name = escape(Path(said.model).name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}: where the time went</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{name}</h1><p>{said.num_requests} requests, {said.num_steps} steps, "
        f"predictions: {escape(said.cost_source)}</p>"
        f"{_figures(said)}{''.join(sections)}</main></body></html>"
    )


def _section(title: str, words: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>" + (f"<p>{escape(words)}</p>" if words else "") + body + "</section>"


def _figures(said: Explanation) -> str:
    m = said.metrics
    figures = [
        (f"{m.output_tokens_per_s:.1f}", "output tokens/s"),
        (seconds_text(m.ttft_mean), "mean TTFT"),
        (seconds_text(m.itl_p50), "median token gap"),
        (seconds_text(m.itl_p95), "95% of token gaps"),
        (f"{said.busy_s / max(1e-9, m.makespan):.0%}", "of the time in steps"),
        (str(said.preemptions), "preemptions"),
    ]
    if said.bandwidth_share is not None and said.flops_share is not None:
        figures += [(f"{said.bandwidth_share:.0%}", "of memory bandwidth"), (f"{said.flops_share:.0%}", "of FLOP/s")]
    return (
        '<div class="figures">'
        + "".join(f'<div class="figure"><b>{escape(value)}</b>{escape(name)}</div>' for value, name in figures)
        + "</div>"
    )


def _legend(names: list[str]) -> str:
    items = "".join(f'<i style="background:{COLOURS[name]}"></i>{escape(name.replace("_", " "))}' for name in names)
    return f'<div class="legend">{items}</div>'


def _span(steps: list[StepRecord]) -> tuple[int, int]:
    return steps[0].end_ns - round(steps[0].seconds.total * 1e9), steps[-1].end_ns


def _slices(steps: list[StepRecord]) -> tuple[float, list[list[tuple[StepRecord, float]]]]:
    """Seconds of a slice of the run, and for each slice its steps with the seconds that they took of it."""
    begin, end = _span(steps)
    width = max(1, (end - begin) / BINS)
    slices: list[list[tuple[StepRecord, float]]] = [[] for _ in range(BINS)]
    for step in steps:
        start, stop = step.end_ns - step.seconds.total * 1e9, step.end_ns
        first, last = int((start - begin) / width), int((stop - begin) / width)
        for index in range(max(0, first), min(BINS - 1, last) + 1):
            overlap = min(stop, begin + (index + 1) * width) - max(start, begin + index * width)
            if overlap > 0:
                slices[index].append((step, overlap / 1e9))
    return width / 1e9, slices


def _timeline(run: LedgerRun) -> str:
    width, slices = _slices(run.steps)
    x, y = x_axis(0, width * BINS), y_axis(0, 1)
    marks = []
    for index, inside in enumerate(slices):
        at, bottom = x.at(index * width), y.at(0)
        for kind in KINDS:
            share = sum(seconds for step, seconds in inside if step.kind == kind) / width
            height = y.at(0) - y.at(min(1.0, share))
            if height:
                marks.append(rect(at, bottom - height, x.at(width) - x.at(0) + 0.3, height, kind))
            bottom -= height
    return frame(x, y, "seconds", "share of time", marks) + _legend(list(KINDS))


def _batch(run: LedgerRun) -> str:
    width, slices = _slices(run.steps)
    charts = []
    for name, kind in (("decode rows", "decode"), ("prompt tokens", "prefill")):
        means = []
        for inside in slices:
            total = sum(seconds for _, seconds in inside)
            counts = [(s.num_decodes if kind == "decode" else s.num_tokens - s.num_decodes, t) for s, t in inside]
            means.append(sum(count * seconds for count, seconds in counts) / total if total else 0.0)
        x, y = x_axis(0, width * BINS), y_axis(0, max(means) or 1.0, height=150)
        marks = [
            rect(x.at(i * width), y.at(mean), x.at(width) - x.at(0) + 0.3, y.at(0) - y.at(mean), kind)
            for i, mean in enumerate(means)
            if mean
        ]
        charts.append(frame(x, y, "seconds", name, marks, 150))
    return "".join(charts)


def _requests(run: LedgerRun) -> str:
    shown = [record for record in run.requests if record.request_id in run.timelines]
    shown.sort(key=lambda record: run.timelines[record.request_id].start_ns)
    left_out = len(shown) - MOST_REQUESTS
    shown = shown[:MOST_REQUESTS]
    if not shown:
        return "<p>No request ended.</p>"
    lines = [run.timelines[record.request_id] for record in shown]
    begin = min(line.start_ns for line in lines)
    height = 18.0 * len(shown) + 50
    x = x_axis(0, (max(line.end_ns for line in lines) - begin) / 1e9)
    marks, kinds = [], set()
    for index, (record, line) in enumerate(zip(shown, lines, strict=True)):
        top, at = 8 + 18.0 * index, x.at((line.start_ns - begin) / 1e9)
        marks.append(
            f'<text class="tick" x="{LEFT_OF_BARS}" y="{top + 11:.0f}" text-anchor="end">{record.request_id}</text>'
        )
        for name, value in line.parts:
            kind = name.partition(":")[0]
            kinds.add(kind)
            wide = x.at(value / 1e9) - x.at(0)
            marks.append(
                rect(
                    at, top, wide, 14, kind, f"request {record.request_id} {record.label}: {name} {value / 1e6:.1f} ms"
                )
            )
            at += wide
    ticks = "".join(
        f'<text class="tick" x="{x.at(v):.1f}" y="{height - 18:.0f}" text-anchor="middle">{short(v)} s</text>'
        for v in x.ticks()
    )
    more = f"<p>{left_out} more requests are not shown.</p>" if left_out > 0 else ""
    legend = _legend([kind for kind in COLOURS if kind in kinds])
    return f'<svg viewBox="0 0 860 {height:.0f}">{"".join(marks)}{ticks}</svg>{legend}{more}'


LEFT_OF_BARS = 54


def _parts(said: Explanation) -> str:
    total = sum(said.parts.values()) or 1.0
    rows = "".join(
        f'<tr><td><code>{escape(name)}</code></td><td class="n">{seconds:.3f} s</td>'
        f'<td class="n">{seconds / total:.1%}</td>'
        f"<td>{escape(MEANINGS[name.partition(':')[0]])}</td></tr>"
        for name, seconds in said.parts.items()
    )
    head = '<tr><th>part</th><th class="n">seconds</th><th class="n">share</th><th>what it is</th></tr>'
    return f"<table>{head}{rows}</table>"


def _scatter(steps: list[StepRecord]) -> str:
    shown = [step for step in steps if step.predicted_s > 0 and step.seconds.total > 0]
    shown = shown[:: max(1, len(shown) // MOST_DOTS)]
    if not shown:
        return "<p>Nothing was predicted.</p>"
    values = [value * 1e3 for step in shown for value in (step.predicted_s, step.seconds.total)]
    low, high = min(values) * 0.8, max(values) * 1.25
    x, y = x_axis(low, high, log=True), y_axis(low, high, log=True, height=320)
    marks = [path([(x.at(low), y.at(low)), (x.at(high), y.at(high))], "rule")]
    marks += [
        dot(
            x.at(step.predicted_s * 1e3),
            y.at(step.seconds.total * 1e3),
            2.6,
            f"{step.kind} faint",
            f"step {step.step_id}: {step.num_decodes} decodes, {step.num_tokens} tokens",
        )
        for step in shown
    ]
    return frame(x, y, "predicted, ms", "measured, ms", marks, 320) + _legend(list(KINDS))


def _limit_words(said: Explanation) -> str:
    known = UNKNOWN if said.limits is None else f"{said.limits.describe()}."
    return f"{known[0].upper()}{known[1:]} Rates are medians inside the model's calls; a dot a step."


def _achieved(run: LedgerRun, said: Explanation) -> str:
    """Table and sentences by kind of step, and the steps under the machine's roof (Williams et al., 2009)."""
    heads = ("kind", "steps", "GB/s", "of limit", "GFLOP/s", "of limit", "binds", "by the clock")
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in (one.kind, str(one.steps), *achieved_cells(one)))
        + "</tr>"
        for one in said.achieved
    )
    words = "".join(f"<li>{escape(one.words)}</li>" for one in said.achieved)
    return f"<table><tr>{head}</tr>{rows}</table><ul>{words}</ul>{_roof(run.steps, said.limits)}"


def _roof(steps: list[StepRecord], limits: MachineLimits | None) -> str:
    shown = [step for step in steps if step.read_bytes > 0 and step.flops > 0 and step.compute_s > 0]
    shown = shown[:: max(1, len(shown) // MOST_DOTS)]
    if not shown:
        return ""
    intensity = [step.flops / step.read_bytes for step in shown]
    rates = [step.flop_rate / 1e9 for step in shown]
    low, high = min(intensity) * 0.8, max(intensity) * 1.25
    roof: list[tuple[float, float]] = []
    if limits is not None:
        bandwidth, top = limits.read_bytes_per_s / 1e9, limits.flops_per_s / 1e9
        ridge = top / bandwidth
        high = max(high, 2 * ridge)
        roof = [(low, low * bandwidth), (ridge, top), (high, top)] if low < ridge else [(low, top), (high, top)]
    x = x_axis(low, high, log=True)
    y = y_axis(min(rates) * 0.8, 1.25 * max([*rates, *(at for _, at in roof)]), log=True, height=280)
    marks = [path([(x.at(flops), y.at(rate)) for flops, rate in roof], "rule")] if roof else []
    marks += [
        dot(x.at(at), y.at(rate), 2.6, f"{step.kind} faint", f"step {step.step_id}: {step.num_tokens} tokens")
        for step, at, rate in zip(shown, intensity, rates, strict=True)
    ]
    return frame(x, y, "FLOP a byte", "GFLOP/s", marks, 280) + _legend(list(KINDS))


def _point_words(said: Explanation) -> str:
    assert said.point is not None
    knee = "there is no knee" if said.point.knee is None else f"the knee is at {said.point.knee} rows"
    return (
        f"The average decode step has {said.point.batch:.1f} rows at {said.point.context:.0f} tokens of context; "
        f"{knee}. "
        "Before it a bigger batch is almost free; past it every row brings its own KV traffic."
    )


def _curve(run: LedgerRun, said: Explanation) -> str:
    assert said.point is not None
    assert run.cost is not None
    point = said.point
    most = 1 << (max(point.knee or 1, round(point.batch), 8) * 4).bit_length()
    batches = [1 << power for power in range(most.bit_length())]
    curve = [(batch, size / 1e6) for batch, size, _ in bytes_curve(run.cost, point.context, batches)]
    floor = point.floor_bytes / 1e6
    x = x_axis(1, batches[-1], log=True)
    y = y_axis(min(floor, curve[-1][1]) * 0.8, curve[0][1] * 1.2, log=True, height=280)
    marks = [
        path([(x.at(1), y.at(floor)), (x.at(batches[-1]), y.at(floor))], "rule"),
        label(x.at(1) + 6, y.at(floor) - 5, "floor: each row's own KV"),
        path([(x.at(batch), y.at(size)) for batch, size in curve], "curve"),
        dot(x.at(max(1.0, point.batch)), y.at(point.bytes_per_token / 1e6), 5, "point", "the average decode step"),
        label(x.at(max(1.0, point.batch)) + 9, y.at(point.bytes_per_token / 1e6) - 6, "this run"),
    ]
    if point.knee is not None:
        at = x.at(point.knee)
        marks += [path([(at, y.start), (at, y.end)], "rule"), label(at + 6, y.end + 12, f"knee: {point.knee}")]
    return frame(x, y, "decode rows", "MB a token", marks, 280)


def _advice(advised: Advised) -> str:
    if not advised.advice:
        return "<p>None of them gains 10% on any goal without losing as much on another.</p>"
    rows = "".join(
        f"<tr><td><code>{escape(one.flags)}</code></td><td>{escape(effect_text(one))}</td><td>{escape(one.needs)}</td></tr>"
        for one in advised.advice
    )
    return f"<table><tr><th>change</th><th>predicted effect</th><th>needs</th></tr>{rows}</table>"
