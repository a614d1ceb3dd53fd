"""Charts as SVG text, for a report of one file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 34


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels.

    Attributes:
        low, high: of the values.
        start, end: pixels of ``low`` and ``high``.
        log: by the logarithm.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixel of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(max(value, self.low)) if self.log else value
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Some round values."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1,) if last - first > 3 else (1, 2, 5)
            return [m * 10.0**e for e in range(first, last + 1) for m in steps if self.low <= m * 10.0**e <= self.high]
        raw = (self.high - self.low) / 5 or 1.0
        size = 10 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + step * i for i in range(count + 1)]


def x_axis(low: float, high: float, log: bool = False) -> Axis:
    """Across the plot."""
    return Axis(low, max(high, low + 1e-9), LEFT, WIDTH - RIGHT, log)


def y_axis(low: float, high: float, log: bool = False, height: float = HEIGHT) -> Axis:
    """Up the plot."""
    return Axis(low, max(high, low + 1e-9), height - BOTTOM, TOP, log)


def frame(x: Axis, y: Axis, x_name: str, y_name: str, marks: Sequence[str], height: float = HEIGHT) -> str:
    """A whole chart: axes with their names, and what is drawn on them."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(y_name)} by {escape(x_name)}">']
    for value in y.ticks():
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in x.ticks():
        at = x.at(value)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - BOTTOM + 15:.1f}" text-anchor="middle">{short(value)}</text>'
        )
    parts.append(
        f'<text class="name" x="{WIDTH - RIGHT}" y="{height - 4:.0f}" text-anchor="end">{escape(x_name)}</text>'
    )
    middle = (y.start + y.end) / 2
    parts.append(
        f'<text class="name" x="13" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 13 {middle:.0f})">{escape(y_name)}</text>'
    )
    return "".join([*parts, *marks, "</svg>"])


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> str:
    """A filled rectangle of a CSS class, with a tooltip."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}"'
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" {size}>{title}</rect>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return f'<path class="{kind}" d="M' + " L".join(f"{x:.1f} {y:.1f}" for x, y in points) + '"/>'


def dot(x: float, y: float, radius: float, kind: str, tip: str = "") -> str:
    """A dot with a tooltip."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{title}</circle>'


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Words in the plot."""
    return f'<text class="note" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def short(value: float) -> str:
    """A number as an axis shows it."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
