"""Means and percentiles, of a list of values and of a stream that is too long to keep."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)
_S = 1e-9
_BITS = 11
"""Significant bits that a gap keeps: bins are at most 2^−10 of their value wide."""


def summary(values_s: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float | None]:
    """``mean, p50, p90, p95, p99`` (percentiles interpolated linearly); None without values."""
    if not len(values_s):
        return {"mean": None, **{f"p{share}": None for share in PERCENTILES}}
    array = np.asarray(values_s, dtype=np.float64)
    found = np.percentile(array, PERCENTILES)
    return {
        "mean": float(array.mean()),
        **{f"p{share}": float(at) for share, at in zip(PERCENTILES, found, strict=True)},
    }


class Gaps:
    """Nanoseconds with weights, kept in bins of 0.1%; the mean is exact, a percentile is its bin's middle."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0
        self._bins: dict[int, int] = {}

    def add(self, gap_ns: int, weight: int) -> None:
        """``weight`` gaps of one length."""
        key = _bin(gap_ns)
        self._bins[key] = self._bins.get(key, 0) + weight
        self.count += weight
        self._sum += gap_ns * weight

    def add_rising(self, gaps_ns: Sequence[int], weight: int, total_ns: int) -> None:
        """``weight`` gaps of each length; none is shorter than the one before it, and ``total_ns`` is their sum."""
        bins, count, at = self._bins, len(gaps_ns), 0
        while at < count:
            gap_ns = gaps_ns[at]
            shift = max(0, gap_ns.bit_length() - _BITS)
            key = _bin(gap_ns)
            # Those below the bin's upper edge are in it too.
            after = count if gaps_ns[-1] < (edge := (gap_ns >> shift) + 1 << shift) else bisect_left(gaps_ns, edge, at)
            bins[key] = bins.get(key, 0) + (after - at) * weight
            at = after
        self.count += count * weight
        self._sum += total_ns * weight

    def summary(self) -> dict[str, float | None]:
        """As `summary`."""
        if not self.count:
            return summary(())
        found: dict[str, float | None] = {"mean": self._sum / self.count * _S}
        keys = sorted(self._bins)
        seen, at = 0, 0
        for share in PERCENTILES:
            while seen + self._bins[keys[at]] < share * self.count / 100:
                seen += self._bins[keys[at]]
                at += 1
            found[f"p{share}"] = _middle(keys[at]) * _S
        return found


def _bin(gap_ns: int) -> int:
    shift = gap_ns.bit_length() - _BITS
    return gap_ns if shift <= 0 else (shift << _BITS) + (gap_ns >> shift)


def _middle(key: int) -> float:
    shift = key >> _BITS
    if not shift:
        return float(key)
    low = (key & ((1 << _BITS) - 1)) << shift
    return low + (1 << shift) / 2
