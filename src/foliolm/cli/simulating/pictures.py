"""Pictures of a run: what ran and waited, how full the pool was, and what users felt."""

from __future__ import annotations

import base64
import html as markup
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foliolm.cli.simulating.text import SPREADS, seconds
from foliolm.core.errors import ConfigError

if TYPE_CHECKING:
    from foliolm.cli.simulating.setup import Described
    from foliolm.simulate.collect import Collector
    from foliolm.simulate.outcome import Outcome

FORMATS = (".png", ".svg")
BLUE, ORANGE, INK, RED, GREEN = "#3a6ea5", "#d98324", "#1b1b1b", "#b0303a", "#4b7f52"
COLORS = (BLUE, ORANGE, GREEN, RED)
_NS = 1e9


def write_pictures(
    outcome: Outcome, numbers: Mapping[str, Any], described: Described, plot: Path | None, html: Path | None
) -> None:
    """Write the picture, the report, or both.

    Raises:
        ConfigError: another kind of file, matplotlib is not installed, or a file cannot be written.
    """
    title = f"{described.setting.shape.name} on {described.setting.need_device().id}"
    if plot is not None:
        save(plot, draw_run(outcome.collector, title))
    if html is not None:
        picture = io.BytesIO()
        draw_run(outcome.collector, title).savefig(picture, format="svg", metadata={"Date": None})
        write(html, _page(title, numbers, picture.getvalue()).encode())


def pyplot() -> Any:
    """Matplotlib without a display, repeatable.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; install it with: pip install 'foliolm[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "foliolm"  # the same input draws the same file
    return plt


def check_kind(path: Path | None) -> None:
    """Refuse a file of another kind, before anything is run.

    Raises:
        ConfigError: its name ends otherwise.
    """
    if path is not None and path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot is {path}; it must end in {' or '.join(FORMATS)}")


def save(path: Path, figure: Any) -> None:
    """Write a figure as what its name says."""
    kind = path.suffix.lower()
    picture = io.BytesIO()
    figure.savefig(picture, format=kind[1:], metadata={"Date": None} if kind == ".svg" else None)
    write(path, picture.getvalue())


def write(path: Path, content: bytes) -> None:
    """Write a file whole.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def draw_run(collector: Collector, title: str) -> Any:
    """Three pictures: requests running and waiting, the KV pool, and the shares of requests below each time."""
    plt = pyplot()
    figure, (load, pool, felt) = plt.subplots(3, 1, figsize=(9, 9), dpi=120, layout="constrained")
    points = collector.curve.points
    start = points[0][0] if points else 0
    at = [(time - start) / _NS for time, *_ in points]
    load.step(at, [running for _, running, _, _ in points], where="post", color=BLUE, linewidth=1.2, label="running")
    load.step(at, [waiting for _, _, waiting, _ in points], where="post", color=ORANGE, linewidth=1.2, label="waiting")
    load.set_ylabel("requests")
    load.legend(frameon=False)
    pool.fill_between(at, [100 * share for *_, share in points], step="post", color=GREEN, alpha=0.4, linewidth=0)
    pool.set_ylim(0, 100)
    pool.set_ylabel("KV pool in use, %")
    pool.set_xlabel("virtual time, s")
    for values, scale, color, name in (
        (collector.ttft, _NS, BLUE, "time to first token"),
        (collector.tpot, _NS, ORANGE, "time per output token"),
        (collector.e2e, _NS, INK, "whole request"),
    ):
        shares(felt, [value / scale for value in values], color, name)
    felt.set_xscale("log")
    felt.set_ylabel("requests below, %")
    felt.set_xlabel("seconds")
    felt.legend(frameon=False)
    load.set_title(title, loc="left")
    finish(load, pool, felt)
    plt.close(figure)
    return figure


def shares(axes: Any, values: list[float], color: str, name: str) -> None:
    """A cumulative curve."""
    ordered = sorted(value for value in values if value > 0)
    if ordered:
        every = max(1, len(ordered) // 2000)
        picked = ordered[::every]
        axes.plot(picked, [100 * (i * every + 1) / len(ordered) for i in range(len(picked))], color=color, label=name)


def finish(*all_axes: Any) -> None:
    """The look that all pictures share."""
    for axes in all_axes:
        axes.grid(True, color="#000000", alpha=0.08)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _page(title: str, numbers: Mapping[str, Any], picture: bytes) -> str:
    rows = "".join(
        f"<tr><td>{text}</td>" + "".join(f"<td>{seconds(value)}</td>" for value in numbers[key].values()) + "</tr>"
        for key, text in SPREADS.items()
    )
    others = "".join(
        f"<tr><td>{markup.escape(name)}</td><td>{markup.escape(json.dumps(value))}</td></tr>"
        for name, value in numbers.items()
        if name not in SPREADS
    )
    image = base64.b64encode(picture).decode()
    return (
        f"<!doctype html><meta charset=utf-8><title>{markup.escape(title)}</title>"
        "<style>body{font:15px system-ui;margin:2em auto;max-width:60em}td,th{padding:.2em .8em;text-align:right}"
        "td:first-child{text-align:left}img{width:100%}</style>"
        f"<h1>{markup.escape(title)}</h1><table><tr><th><th>mean<th>p50<th>p90<th>p95<th>p99</tr>{rows}</table>"
        f'<p><img alt="the run" src="data:image/svg+xml;base64,{image}"></p><table>{others}</table>\n'
    )
