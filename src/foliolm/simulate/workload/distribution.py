"""Distributions of lengths and times, as the command line spells them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from foliolm.core.errors import ConfigError

FORMS = "N, constant:N, uniform:LOW:HIGH, lognormal:MEAN:CV, exponential:MEAN or empirical:FILE"

Draw = Callable[[random.Random], float]


class Distribution:
    """A positive quantity. Draws depend on the generator alone, so that a seed says everything.

    Args:
        spec: as it was written.
        draw: one value.
        mean: expected value.
    """

    def __init__(self, spec: str, draw: Draw, mean: float) -> None:
        self.spec = spec
        self.mean = mean
        self._draw = draw

    def real(self, rng: random.Random) -> float:
        """One value, at least 0."""
        return max(0.0, self._draw(rng))

    def whole(self, rng: random.Random) -> int:
        """One value as a whole number of at least 1."""
        return max(1, round(self._draw(rng)))


def distribution(field: str, spec: str) -> Distribution:
    """Read a distribution.

    ``lognormal:MEAN:CV`` has that mean and coefficient of variation: ``σ² = ln(1 + cv²)``, ``μ = ln(mean) − σ²/2``.
    ``empirical:FILE`` draws one of a file's numbers (one a line, or a JSON list), all alike.

    Raises:
        ConfigError: names ``field`` and what was wrong.
    """
    name, _, rest = spec.strip().partition(":")
    if not rest and name and name[0].isdigit():
        name, rest = "constant", name
    if name == "empirical":
        values = _read_values(field, Path(rest))
        return Distribution(spec, lambda rng: values[int(rng.random() * len(values))], sum(values) / len(values))
    numbers = [_number(field, spec, word) for word in rest.split(":")] if rest else []
    if name == "constant" and len(numbers) == 1:
        value = numbers[0]
        return Distribution(spec, lambda _: value, value)
    if name == "uniform" and len(numbers) == 2:
        low, high = numbers
        if low > high:
            raise ConfigError(f"{field} is {spec!r}: LOW {low:g} is above HIGH {high:g}")
        return Distribution(spec, lambda rng: low + (high - low) * rng.random(), (low + high) / 2)
    if name == "lognormal" and len(numbers) == 2:
        mean, variation = numbers
        if mean <= 0:
            raise ConfigError(f"{field} is {spec!r}: MEAN must be above 0")
        sigma = math.sqrt(math.log(1 + variation**2))
        mu = math.log(mean) - sigma**2 / 2
        return Distribution(spec, lambda rng: rng.lognormvariate(mu, sigma), mean)
    if name == "exponential" and len(numbers) == 1 and numbers[0] > 0:
        mean = numbers[0]
        return Distribution(spec, lambda rng: rng.expovariate(1 / mean), mean)
    raise ConfigError(f"{field} is {spec!r}; it must be {FORMS}")


def _number(field: str, spec: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ConfigError(f"{field} is {spec!r}: {word!r} is no number; it must be {FORMS}") from None
    if not math.isfinite(value) or value < 0 or value > 2**40:
        raise ConfigError(f"{field} is {spec!r}: {word} must be from 0 to 2^40")
    return value


def _read_values(field: str, path: Path) -> list[float]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error}") from None
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [float(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError(f"{field}: {path} must hold numbers, one a line or as a JSON list: {error}") from None
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < 2**40]
    if not values or wrong:
        what = f"it holds {wrong[0]!r}" if wrong else "it is empty"
        raise ConfigError(f"{field}: {path} must hold numbers from 0 to 2^40, and at least one; {what}")
    return [float(value) for value in values]
