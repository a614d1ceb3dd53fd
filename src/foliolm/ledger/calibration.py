"""Fitting the step cost to measured steps: bounded least squares on the relative error, weakly tied to what was known.

Decode-only steps say what the host, the rows, the weights and the decodes' attention cost; prefill-only steps then what
matrix products and the chunks' attention cost; mixed steps how much slower decodes read beside a chunk; then all steps
settle all of them together. A table of factors by the number of new tokens then takes up what the linears' kernels do
at sizes that no roofline describes. Needs SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import linear_flops, weight_bytes_per_step
from foliolm.ledger.plan_cost import Slowdown
from foliolm.ledger.samples import Sample
from foliolm.ledger.step_cost import Coefficients, StepCost

Floats = npt.NDArray[np.float64]

RATES = (
    "step_s",
    "sequence_s",
    "token_s",
    "chunk_s",
    "weights",
    "matmul",
    "kv_decode",
    "kv_mixed",
    "attention",
    "prefix_reads",
)
"""What is fitted, as seconds a unit of work; efficiencies are their inverses."""
STAGES = (
    ("decode", ("step_s", "sequence_s", "weights", "matmul", "kv_decode")),
    ("prefill", ("token_s", "matmul", "attention", "prefix_reads")),
    ("mixed", ("chunk_s", "kv_mixed")),
    ("all", RATES),
)
FEWEST = 3
"""Steps of a kind below which its stage is left out."""
TIE = 2e-5
"""Weight of what was known before: it only decides what the data leave open."""
KNOT_TIE = 0.01
OUTLIER = 0.1
"""Relative errors beyond it count less than quadratically: a step that the machine interrupted says little."""
ALIKE = 0.985
"""Two terms whose effects on all steps have at least this cosine cannot be told apart."""
SMALLEST_EFFICIENCY = 1e-5
MOST_SLOWED = 10.0
"""In the mean slowdown no step counts for more than so many times what the fit says of it: somebody shut the lid."""


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors of predictions on steps that the fit did not see.

    Attributes:
        count: steps.
        median, p90: of the absolute relative error.
        total: predicted over measured time of all of them together, minus 1.
    """

    count: int
    median: float
    p90: float
    total: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted step cost and how far to trust it.

    Attributes:
        cost: the step cost.
        errors: by kind of step, and ``all``, on held-out steps.
        alike: pairs of terms that the data cannot tell apart.
        unseen: terms that the data say nothing about; they stay as they were.
        num_steps: steps that were given.
        slowdown: of all steps together, against the fit, which follows typical ones.
    """

    cost: StepCost
    errors: dict[str, StepError]
    alike: tuple[tuple[str, str], ...]
    unseen: tuple[str, ...]
    num_steps: int
    slowdown: Slowdown


def calibrate(cost: StepCost, samples: Sequence[Sample], table: bool = True, hold_out: bool = True) -> Calibration:
    """Fit the coefficients of ``cost`` to ``samples``; every fifth is held out and judged by.

    Args:
        cost: model, device and what is known so far.
        samples: at least 10 steps.
        table: also fit the factors of the linears by new tokens.
        hold_out: False: fit all of them; the errors are then of the fit itself.

    Raises:
        ConfigError: too few steps.
    """
    if len(samples) < 10:
        raise ConfigError(f"{len(samples)} steps are too few to calibrate from; at least 10 are needed")
    held = [sample for index, sample in enumerate(samples) if index % 5 == 4] if hold_out else list(samples)
    seen = [sample for index, sample in enumerate(samples) if index % 5 != 4] if hold_out else list(samples)
    plain = replace(cost, linear_knots=())
    fit = _Fit(plain, seen)
    for _ in range(3):
        for kind, names in STAGES:
            fit.stage(kind, names)
        if table:
            fit.fit_knots()
    fitted = fit.cost()
    alike, unseen = fit.apart()
    errors = {kind: step_error(fitted, [s for s in held if s.kind == kind]) for kind in ("decode", "prefill", "mixed")}
    errors["all"] = step_error(fitted, held)
    known = {kind: error for kind, error in errors.items() if error.count}
    return Calibration(fitted, known, alike, unseen, len(samples), mean_slowdown(fitted, samples))


def step_error(cost: StepCost, samples: Sequence[Sample]) -> StepError:
    """How well ``cost`` predicts ``samples``."""
    if not samples:
        return StepError(0, math.nan, math.nan, math.nan)
    predicted = np.array([cost.seconds(sample.counts) for sample in samples])
    measured = np.array([sample.seconds for sample in samples])
    relative = np.abs(predicted / measured - 1)
    return StepError(
        len(samples),
        float(np.median(relative)),
        float(np.quantile(relative, 0.9)),
        float(predicted.sum() / measured.sum() - 1),
    )


def mean_slowdown(cost: StepCost, samples: Sequence[Sample]) -> Slowdown:
    """By how much steps took longer in all than ``cost`` says; 1 for a kind of steps of which there were none.

    Interruptions only ever lengthen a step, so that the mean lies above the typical step. Whoever adds steps up needs
    the mean.
    """
    predicted = {True: 0.0, False: 0.0}
    measured = {True: 0.0, False: 0.0}
    for sample in samples:
        seconds, has_prompt = cost.seconds(sample.counts), bool(sample.counts.prefills)
        predicted[has_prompt] += seconds
        measured[has_prompt] += min(sample.seconds, MOST_SLOWED * seconds)
    ratios = {key: measured[key] / predicted[key] if predicted[key] else 1.0 for key in predicted}
    return Slowdown(decode=ratios[False], prompt=ratios[True])


class _Fit:
    """Work of each step by term, and the seconds a unit of it."""

    def __init__(self, cost: StepCost, samples: Sequence[Sample]) -> None:
        self._start = cost
        self._kinds = np.array([sample.kind for sample in samples])
        self._seconds = np.array([sample.seconds for sample in samples])
        self._tokens = np.array([sample.counts.new_tokens for sample in samples], dtype=np.float64)
        self._work = {name: np.zeros(len(samples)) for name in RATES}
        for index, sample in enumerate(samples):
            for name, work in _work_of(cost, sample).items():
                self._work[name][index] = work
        self._fixed = self._fixed_seconds(samples)
        self.rates = _rates_of(cost)
        self._known = dict(self.rates)
        self._knots: Floats = np.zeros(0)
        self._factors: Floats = np.ones(0)

    def _fixed_seconds(self, samples: Sequence[Sample]) -> Floats:
        """What is not fitted: exchanges between devices, adapters."""
        terms = [self._start.terms(sample.counts) for sample in samples]
        return np.array([term.all_reduce + term.lora for term in terms])

    def predicted(self, rates: dict[str, float], at: Floats | slice = slice(None)) -> Floats:
        """Seconds of the steps under some rates."""
        work = self._work
        linears = np.hypot(work["weights"][at] * rates["weights"], work["matmul"][at] * rates["matmul"])
        linears = linears * self._factor(self._tokens[at])
        others = sum(work[name][at] * rates[name] for name in RATES if name not in ("weights", "matmul"))
        return np.asarray(self._fixed[at] + linears + others)

    def _factor(self, tokens: Floats) -> Floats:
        if not self._knots.size:
            return np.ones_like(tokens)
        return np.asarray(np.interp(np.log(np.maximum(tokens, 1)), np.log(self._knots), self._factors))

    def stage(self, kind: str, names: Sequence[str]) -> None:
        """Fit some rates to the steps of one kind."""
        from scipy.optimize import least_squares

        at = np.ones(len(self._kinds), bool) if kind == "all" else self._kinds == kind
        free = [name for name in names if self._work[name][at].any()]
        if int(at.sum()) < FEWEST or not free:
            return
        known = np.array([self._known[name] for name in free])
        scale = np.where(known > 0, known, _scale_of(free, self._work, self._seconds, at))
        measured = self._seconds[at]

        def misses(values: Floats) -> Floats:
            rates = {**self.rates, **dict(zip(free, values * scale, strict=True))}
            relative = self.predicted(rates, at) / measured - 1
            # Squares of small residuals stay; the tie is as heavy as a share of the steps, however many there are.
            tie = TIE * math.sqrt(len(measured)) * (values - known / scale)
            return np.concatenate((_tempered(relative), tie))

        start = np.array([self.rates[name] for name in free]) / scale
        found = least_squares(misses, np.maximum(start, 1e-9), bounds=(0.0, np.inf), x_scale=1.0)
        self.rates.update(zip(free, (found.x * scale).tolist(), strict=True))

    def fit_knots(self) -> None:
        """Factors of the linears at powers of two of new tokens, as far as there are steps near them."""
        from scipy.optimize import lsq_linear

        highest = float(self._tokens.max())
        knots = [1.0]
        while knots[-1] < highest:
            knots.append(knots[-1] * 2)
        self._knots, self._factors = np.array(knots), np.ones(len(knots))
        work = self._work
        linears = np.hypot(work["weights"] * self.rates["weights"], work["matmul"] * self.rates["matmul"])
        rest = self.predicted(self.rates) - linears
        place = np.interp(np.log(np.maximum(self._tokens, 1)), np.log(self._knots), np.arange(len(knots)))
        low = np.minimum(place.astype(int), len(knots) - 2) if len(knots) > 1 else np.zeros(len(place), int)
        share = place - low
        matrix = np.zeros((len(place), len(knots)))
        rows = np.arange(len(place))
        matrix[rows, low] = 1 - share
        if len(knots) > 1:
            matrix[rows, low + 1] += share
        scaled = matrix * (linears / self._seconds)[:, None]
        target = (self._seconds - rest) / self._seconds
        weight = np.ones(len(place))
        tie = np.eye(len(knots)) * KNOT_TIE * math.sqrt(len(place))
        factors = np.ones(len(knots))
        for _ in range(4):  # reweighted: outliers count less each time
            found = lsq_linear(
                np.vstack((scaled * weight[:, None], tie)),
                np.concatenate((target * weight, np.diag(tie))),
                bounds=(0.1, 10.0),
            )
            factors = found.x
            miss = np.abs(scaled @ factors - target)
            weight = np.sqrt(1 / np.maximum(1.0, miss / OUTLIER))
        self._factors = factors

    def cost(self) -> StepCost:
        """The step cost that the rates and the table make."""
        cost, rates = self._start, self.rates
        bandwidth, flops, peak = cost.bandwidth, cost.flops, cost.attention_peak
        changed = {
            "step_s": rates["step_s"],
            "layer_s": 0.0,
            "sequence_s": rates["sequence_s"],
            "token_s": rates["token_s"],
            "chunk_s": rates["chunk_s"],
            "weights": _efficiency(rates["weights"], bandwidth),
            "matmul": _efficiency(rates["matmul"], flops),
            "kv_decode": _efficiency(rates["kv_decode"], bandwidth),
            "kv_mixed": _efficiency(rates["kv_mixed"], bandwidth),
            "attention": _efficiency(rates["attention"], peak),
            "prefix_reads": rates["prefix_reads"] * bandwidth,
        }
        knots = tuple(zip(self._knots.tolist(), self._factors.tolist(), strict=True))
        return replace(cost, coefficients=replace(cost.coefficients, **changed), linear_knots=knots)

    def apart(self) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
        """Pairs of terms with like effects on every step, and terms without any."""
        effects: dict[str, Floats] = {}
        unseen = []
        for name in RATES:
            nudged = max(self.rates[name], self._known[name], 1e-15) * 1e-3
            effect = (self.predicted({**self.rates, name: self.rates[name] + nudged}) - self.predicted(self.rates)) / (
                self._seconds
            )
            size = float(np.linalg.norm(effect))
            if size < 1e-9 * math.sqrt(len(effect)) or not self._work[name].any():
                unseen.append(name)
            else:
                effects[name] = effect / size
        names = list(effects)
        alike = [
            (a, b) for i, a in enumerate(names) for b in names[i + 1 :] if abs(float(effects[a] @ effects[b])) > ALIKE
        ]
        return tuple(alike), tuple(unseen)


def _work_of(cost: StepCost, sample: Sample) -> dict[str, float]:
    """A step's work in each term's unit."""
    model, counts = cost.model, sample.counts
    kv_bytes = sum(
        max(
            context * spec.bytes_per_token,
            # Where the device computes longer than it reads (MLA), the term is booked as the bytes that take as long.
            context
            * spec.num_layers
            * model.decode_flops_per_pair
            / (cost.coefficients.attention * cost.attention_peak)
            * cost.coefficients.kv_decode
            * cost.bandwidth
            if model.decode_flops_per_pair > 2 * model.attention_flops_per_pair
            else 0.0,
        )
        for spec, context in zip(model.kv, counts.decode_context, strict=True)
    )
    return {
        "step_s": 1.0,
        "sequence_s": counts.sequences,
        "token_s": counts.new_tokens,
        "chunk_s": len(counts.prefills),
        "weights": weight_bytes_per_step(model, counts.new_tokens, counts.sampled > 0),
        "matmul": linear_flops(model, counts.new_tokens, counts.sampled),
        "kv_decode": 0.0 if counts.prefills else kv_bytes,
        "kv_mixed": kv_bytes if counts.prefills else 0.0,
        "attention": cost.prefill_attention_flops(counts),
        "prefix_reads": cost.prefix_bytes(counts),
    }


def _rates_of(cost: StepCost) -> dict[str, float]:
    c = cost.coefficients
    return {
        "step_s": c.step_s + c.layer_s * cost.model.num_layers,
        "sequence_s": c.sequence_s,
        "token_s": c.token_s,
        "chunk_s": c.chunk_s,
        "weights": 1 / (c.weights * cost.bandwidth),
        "matmul": 1 / (c.matmul * cost.flops),
        "kv_decode": 1 / (c.kv_decode * cost.bandwidth),
        "kv_mixed": 1 / (c.kv_mixed * cost.bandwidth),
        "attention": 1 / (c.attention * cost.attention_peak),
        "prefix_reads": c.prefix_reads / cost.bandwidth,
    }


def _efficiency(rate: float, peak: float) -> float:
    """The share of a peak that a rate of seconds a unit makes; a term that costs nothing is very efficient."""
    return 1 / max(rate * peak, SMALLEST_EFFICIENCY)


def _scale_of(names: list[str], work: dict[str, Floats], seconds: Floats, at: Floats) -> Floats:
    """For terms that cost nothing so far: the rate at which they would be a tenth of the steps' time."""
    return np.array([0.1 * seconds[at].sum() / work[name][at].sum() for name in names])


def _tempered(relative: Floats) -> Floats:
    """Residuals whose squares grow linearly beyond ``OUTLIER`` (Huber's loss as residuals)."""
    size = np.abs(relative)
    beyond = np.sqrt(np.maximum(0.0, 2 * OUTLIER * size - OUTLIER**2))
    return np.asarray(np.where(size <= OUTLIER, relative, np.sign(relative) * beyond))


def coefficient_table(cost: StepCost) -> dict[str, float]:
    """The coefficients by name, for people."""
    c: Coefficients = cost.coefficients
    return {name: getattr(c, name) for name in RATES}
