"""Measured kernel times of one model on one device: CSV tables, one layer's worth each.

dense.csv         layer,tokens,time_us
per_sequence.csv  layer,sequences,time_us
attention.csv     prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
moe.csv           tokens,activated_experts,time_us        (where the model routes)
skew.csv          regime,n,t_mean_us,t_max_us,t_skew_us   (where it was measured: decodes of unequal contexts)
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.ledger.interpolation import Curve, Grid, complete_grid

_US = 1e-6
_LEAST_SPREAD_US = 5.0
CALLS_PER_LAYER = {"layernorm": 2, "qk_norm": 1, "qkv_proj": 1, "o_proj": 1, "rotary_emb": 1}
"""How often a layer calls what the table holds one call of: there is a norm before attention and one before the MLP
(the table has their mean). Others are called once."""
ONCE = ("embedding", "final_layernorm")
"""Called once a step, not once a layer."""
MLP = ("gate_up_proj", "act_fn", "down_proj")
Attention = dict[tuple[int, int, int, int], float]
PURE_SKEW = {2: 0.075, 4: 0.05, 8: 0.052, 16: 0.02, 32: 0.146, 64: 0.075, 128: 0.026, 256: 0.006}
MIXED_SKEW = {2: 0.913, 4: 0.332, 8: 0.243, 16: 0.159, 32: 0.098, 64: 0.057, 128: 0.007}
"""By decode rows: of what attention would take more if every row had the longest context instead of the mean, the
share that it does take: one long row holds its thread blocks back. For profiles without ``skew.csv``: medians of the
13,009 measurements of the RTX 4090 profile of Llama-3.1-8B in LLMServingSim (5daddb21a545, profiler/perf, MIT), whose
kernels (FlashAttention-2) are the same."""


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Seconds of kernels.

    Attributes:
        folder: where they were read.
        a_layer: by name, over new tokens: what each layer calls, with how often.
        once: the same, called once a step.
        mlp: names of ``a_layer`` that a routed layer replaces.
        per_sequence: by name, over sampled sequences, once a step.
        decodes: attention of a layer in a step of decodes alone, over (rows, mean context).
        prefill: of one chunk alone, over (new tokens, cached tokens).
        mixed: of one chunk beside decodes, over (new, cached, rows, mean context).
        experts: of a routed MLP, over (tokens, distinct experts), or None.
        pure_skew, mixed_skew: see ``PURE_SKEW``.
    """

    folder: Path
    a_layer: dict[str, tuple[int, Curve]]
    once: dict[str, Curve]
    per_sequence: dict[str, Curve]
    decodes: Grid
    prefill: Grid
    mixed: Grid
    experts: Grid | None = None
    pure_skew: Curve = field(default_factory=lambda: Curve(PURE_SKEW))
    mixed_skew: Curve = field(default_factory=lambda: Curve(MIXED_SKEW))


def read_kernel_tables(folder: Path) -> KernelTables:
    """Read a folder of tables.

    Raises:
        ConfigError: a file is missing or damaged, or attention was not measured at every crossing of its axes.
    """
    dense = _curves(folder / "dense.csv", "layer", "tokens")
    for name in ("qkv_proj", "o_proj"):
        if name not in dense:
            raise ConfigError(f"{folder / 'dense.csv'} has no layer {name!r}; it has {', '.join(sorted(dense))}")
    decodes, prefill, mixed = _attention(folder / "attention.csv")
    experts = folder / "moe.csv"
    return KernelTables(
        folder,
        {name: (CALLS_PER_LAYER.get(name, 1), curve) for name, curve in dense.items() if name not in ONCE},
        {name: dense[name] for name in ONCE if name in dense},
        _curves(folder / "per_sequence.csv", "layer", "sequences"),
        decodes,
        prefill,
        mixed,
        _experts(experts) if experts.is_file() else None,
        *_skew(folder / "skew.csv"),
    )


def _rows(path: Path, names: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: column {missing[0]!r} is missing")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"kernel times {path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"kernel times {path} hold no row")
    return rows


def _numbers(path: Path, line: int, row: dict[str, str], names: Sequence[str]) -> list[float]:
    found = []
    for name in names:
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{path} line {line}: {name} is {row[name]!r}; it must be a number of at least 0")
        found.append(value)
    return found


def _curves(path: Path, key: str, quantity: str) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for line, row in enumerate(_rows(path, (key, quantity, "time_us")), 2):
        at, time_us = _numbers(path, line, row, (quantity, "time_us"))
        points.setdefault(row[key], {})[int(at)] = time_us * _US
    return {name: Curve(values) for name, values in points.items()}


def _experts(path: Path) -> Grid:
    """Over tokens and experts; a crossing that cannot be (more experts than tokens reach) has its row's last time."""
    points: dict[tuple[int, ...], float] = {}
    for line, row in enumerate(_rows(path, ("tokens", "activated_experts", "time_us")), 2):
        tokens, experts, time_us = _numbers(path, line, row, ("tokens", "activated_experts", "time_us"))
        points[int(tokens), int(experts)] = time_us * _US
    all_tokens, all_experts = (sorted({key[i] for key in points}) for i in (0, 1))
    for tokens in all_tokens:
        last = None
        for experts in all_experts:
            last = points.setdefault((tokens, experts), last if last is not None else 0.0)
    return Grid((all_tokens, all_experts), [points[t, e] for t in all_tokens for e in all_experts])


def _skew(path: Path) -> tuple[Curve, Curve]:
    """Medians by decode rows, of decodes alone and beside a chunk."""
    if not path.is_file():
        return Curve(PURE_SKEW), Curve(MIXED_SKEW)
    names = ("n", "t_mean_us", "t_max_us", "t_skew_us")
    shares: dict[str, dict[int, list[float]]] = {"pure": {}, "mixed": {}}
    for line, row in enumerate(_rows(path, ("regime", *names)), 2):
        count, mean, longest, skewed = _numbers(path, line, row, names)
        if row["regime"] not in shares:
            raise ConfigError(f"{path} line {line}: regime is {row['regime']!r}; it must be pure or mixed")
        if longest - mean > _LEAST_SPREAD_US:
            shares[row["regime"]].setdefault(int(count), []).append((skewed - mean) / (longest - mean))
    found = {
        regime: {count: min(1.0, max(0.0, statistics.median(values))) for count, values in by_count.items()}
        for regime, by_count in shares.items()
    }
    return Curve(found["pure"] or PURE_SKEW), Curve(found["mixed"] or MIXED_SKEW)


def _attention(path: Path) -> tuple[Grid, Grid, Grid]:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    points: Attention = {}
    for line, row in enumerate(_rows(path, names), 2):
        chunk, cached, decodes, context, time_us = _numbers(path, line, row, names)
        points[int(chunk), int(cached), int(decodes), int(context)] = time_us * _US
    parts: tuple[dict[tuple[int, ...], float], ...] = (
        {key[2:]: time for key, time in points.items() if key[0] == 0 and key[2]},
        {key[:2]: time for key, time in points.items() if key[0] and not key[2]},
        {key: time for key, time in points.items() if key[0] and key[2]},
    )
    grids = []
    for what, part in zip(("decodes alone", "a chunk alone", "a chunk beside decodes"), parts, strict=True):
        grid = _grid(part)
        if grid is None:
            raise ConfigError(f"{path}: attention of {what} was not measured at every crossing of its axes")
        grids.append(grid)
    return grids[0], grids[1], grids[2]


def _grid(points: dict[tuple[int, ...], float]) -> Grid | None:
    """The grid of all axes' values; where several grids were mixed, the one of 0 and the powers of two."""
    if not points:
        return None
    axes = [sorted({key[i] for key in points}) for i in range(len(next(iter(points))))]
    return complete_grid(points, axes) or complete_grid(
        points, [[x for x in axis if x & (x - 1) == 0] for axis in axes]
    )
