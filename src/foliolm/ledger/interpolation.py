"""Tables of measured values, read between their points: linear along each axis, and on beyond the last."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence


class Curve:
    """A value over one quantity.

    Args:
        points: value by quantity; at least one.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self.xs = sorted(points)
        self.ys = [points[x] for x in self.xs]
        self._known: dict[float, float] = {}

    def __call__(self, x: float) -> float:
        """The value at ``x``; below all points the first value, beyond them on by the last slope, but never down."""
        known = self._known.get(x)
        if known is None:
            known = self._known[x] = self._look_up(x)
        return known

    def _look_up(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        at = min(bisect.bisect_left(xs, x), len(xs) - 1)
        share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
        value = ys[at - 1] + share * (ys[at] - ys[at - 1])
        return max(value, ys[-1]) if x > xs[-1] else value


class Grid:
    """A value over several quantities, measured at every crossing of their axes.

    Args:
        axes: each ascending, at least one point.
        values: in row-major order, the last axis running fastest.
    """

    def __init__(self, axes: Sequence[Sequence[int]], values: Sequence[float]) -> None:
        self.axes = [list(axis) for axis in axes]
        self.values = list(values)
        self._strides: list[int] = []
        stride = 1
        for axis in reversed(self.axes):
            self._strides.insert(0, stride)
            stride *= len(axis)

    def __call__(self, *at: float) -> float:
        """The multilinear value; below an axis the value at its first point, beyond it on by the last slope."""
        corners = [(0, 1.0)]
        for axis, stride, x in zip(self.axes, self._strides, at, strict=True):
            if x <= axis[0] or len(axis) == 1:
                continue
            upper = min(bisect.bisect_left(axis, x), len(axis) - 1)
            low = axis[upper - 1]
            share = (x - low) / (axis[upper] - low)
            lower = (upper - 1) * stride
            corners = [
                entry
                for offset, weight in corners
                for entry in ((offset + lower, weight * (1 - share)), (offset + lower + stride, weight * share))
                if entry[1]
            ]
        values = self.values
        return max(0.0, sum(values[offset] * weight for offset, weight in corners))


def complete_grid(points: Mapping[tuple[int, ...], float], axes: Sequence[Sequence[int]]) -> Grid | None:
    """The grid over ``axes``, or None where a crossing was not measured."""
    keys: list[tuple[int, ...]] = [()]
    for axis in axes:
        keys = [(*key, x) for key in keys for x in axis]
    if any(key not in points for key in keys):
        return None
    return Grid(axes, [points[key] for key in keys])
