"""Means and percentiles, of a list of values and of a stream that is too long to keep."""

from __future__ import annotations

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

    def add_rising(self, gaps_ns: Sequence[int], weight: int) -> None:
        """``weight`` gaps of each length; none is shorter than the one before it."""
        if not gaps_ns:
            return
        key = _bin(gaps_ns[0])
        if key == _bin(gaps_ns[-1]):
            total = len(gaps_ns) * weight
            self._bins[key] = self._bins.get(key, 0) + total
            self.count += total
            self._sum += sum(gaps_ns) * weight
            return
        bins, last = self._bins, 0
        for at, gap_ns in enumerate(gaps_ns):
            other = _bin(gap_ns)
            if other != key:
                bins[key] = bins.get(key, 0) + (at - last) * weight
                key, last = other, at
        bins[key] = bins.get(key, 0) + (len(gaps_ns) - last) * weight
        self.count += len(gaps_ns) * weight
        self._sum += sum(gaps_ns) * weight

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
