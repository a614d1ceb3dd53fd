"""ServeGen: clients described by rates and histograms, window by window, from which requests are drawn."""

from __future__ import annotations

import ast
import bisect
import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import Item

WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class _Histogram:
    """Values, and their summed shares."""

    values: tuple[int, ...]
    until: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        return self.values[bisect.bisect_left(self.until, rng.random() * self.until[-1])]


@dataclass(frozen=True, slots=True)
class _Window:
    """When it begins, requests a second, and the intervals' law with its shape."""

    start_s: float
    rate: float
    pattern: str
    shape: float


def servegen_entries(folder: Path, seed: int = 0) -> Iterator[tuple[float, Item]]:
    """(seconds, item) of all clients in a folder, in order of time.

    Each client is a pair of files ``NAME-trace.csv`` (start, requests a second, coefficient of variation, Gamma or
    Weibull, two parameters, a window of 600 s each) and ``NAME-dataset.json`` (histograms of lengths by window). The
    intervals follow the window's law with its shape, scaled to its rate; lengths are drawn from the newest histogram.

    Raises:
        ConfigError: there is no client, or a file is wrong.
    """
    traces = sorted(folder.glob("*-trace.csv"))
    if not traces:
        raise ConfigError(f"{folder} holds no NAME-trace.csv with a NAME-dataset.json beside it")
    return heapq.merge(*(_client(path, seed) for path in traces), key=lambda entry: entry[0])


def _client(trace: Path, seed: int) -> Iterator[tuple[float, Item]]:
    name = trace.name.removesuffix("-trace.csv")
    lengths = _lengths(trace.with_name(f"{name}-dataset.json"))
    starts = sorted(lengths)
    rng = random.Random(f"{seed}:{name}")
    for window in _windows(trace):
        if window.rate <= 0:
            continue
        at = max(0, bisect.bisect_right(starts, window.start_s) - 1)
        inputs, outputs = lengths[starts[at]]
        now = window.start_s
        for number in itertools.count():
            now += _interval(window, rng)
            if now >= window.start_s + WINDOW_S:
                break
            label = f"{name}/{window.start_s:.0f}/{number}"
            yield now, Item(0, max(1, inputs.draw(rng)), max(1, outputs.draw(rng)), label=label)


def _interval(window: _Window, rng: random.Random) -> float:
    mean, shape = 1 / window.rate, window.shape
    if window.pattern == "Gamma":
        return rng.gammavariate(shape, mean / shape)
    if window.pattern == "Weibull":
        return rng.weibullvariate(mean / math.gamma(1 + 1 / shape), shape)
    return rng.expovariate(window.rate)


def _windows(path: Path) -> Iterator[_Window]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        cells = line.split(",")
        try:
            start, rate, pattern, shape = float(cells[0]), float(cells[1]), cells[3].strip(), float(cells[4] or 0)
        except (ValueError, IndexError):
            raise ConfigError(f"{path} line {number}: it must hold start, rate, cv, pattern and two numbers") from None
        if pattern not in ("", "Gamma", "Weibull"):
            raise ConfigError(f"{path} line {number}: pattern is {pattern!r}; it must be Gamma, Weibull or empty")
        if not (math.isfinite(rate) and rate >= 0) or (pattern and not shape > 0):
            raise ConfigError(f"{path} line {number}: the rate must be at least 0 and the shape above 0")
        yield _Window(start, rate, pattern, shape)


def _lengths(path: Path) -> dict[float, tuple[_Histogram, _Histogram]]:
    try:
        windows = json.loads(path.read_text(encoding="utf-8"))
        found = {
            float(start): (_histogram(lengths["input_tokens"]), _histogram(lengths["output_tokens"]))
            for start, lengths in windows.items()
        }
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as ServeGen's histograms of lengths: {error!r}") from None
    known = {start: (inputs, outputs) for start, (inputs, outputs) in found.items() if inputs and outputs}
    if not known:
        raise ConfigError(f"{path} holds no window with lengths")
    return known


def _histogram(text: str) -> _Histogram | None:
    shares = ast.literal_eval(text)
    pairs = sorted((int(value), float(share)) for value, share in shares.items() if share > 0)
    if not pairs:
        return None
    return _Histogram(tuple(value for value, _ in pairs), tuple(itertools.accumulate(share for _, share in pairs)))
