"""The picture of `plan read`: bytes a token by batch, with the knee and the floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import kv_bytes_of_context, weight_bytes_per_step
from foliolm.plan.report import Report, size
from foliolm.plan.setting import Setting

FORMATS = (".png", ".svg")
_WEIGHTS, _KV, _TOTAL, _KNEE, _INK = "#3a6ea5", "#d98324", "#1b1b1b", "#b0303a", "#555555"
_BACK = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}


def plot_read(path: Path, setting: Setting, report: Report, batches: Sequence[int]) -> None:
    """Draw ``d(b, L) = D_w / b + L · k`` over b, both axes logarithmic.

    Args:
        path: the file to write, .png or .svg.
        setting: the model.
        report: what `plan_read` said.
        batches: those asked for; marked on the curve.

    Raises:
        ConfigError: another kind of file, matplotlib is not installed, or the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot is {path}; it must end in {' or '.join(FORMATS)}")
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("plot needs matplotlib; install it with: pip install 'foliolm[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "foliolm"  # the same input draws the same file
    figure, axes = plt.subplots(figsize=(8.4, 5.2), dpi=150, layout="constrained")
    try:
        _draw(axes, setting, report, batches)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    finally:
        plt.close(figure)


def _draw(axes: Any, setting: Setting, report: Report, batches: Sequence[int]) -> None:
    model, numbers = setting.account, report.numbers
    context, knee, fits = numbers["context"], numbers["knee_batch"], numbers.get("sequences_that_fit")
    last = max(2 * max(batches), 4 * (knee or 1), 64)
    curve = sorted({max(1, round(last ** (i / 160))) for i in range(161)} | set(batches))
    weights = [weight_bytes_per_step(model, b) / b for b in curve]
    floor = kv_bytes_of_context(model, context)
    total = [part + floor for part in weights]
    axes.fill_between(curve, floor, total, color=_WEIGHTS, alpha=0.16, linewidth=0)
    if floor > 0:
        bottom = min(floor, min(weights)) / 2.2
        axes.fill_between(curve, bottom, floor, color=_KV, alpha=0.16, linewidth=0)
        axes.axhline(floor, color=_KV, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.set_ylim(bottom, total[0] * 2.4)
    axes.plot(curve, weights, color=_WEIGHTS, linewidth=1.2, linestyle=(0, (1, 1.5)))
    axes.plot(curve, total, color=_TOTAL, linewidth=2.2)
    for row in numbers["rows"]:
        axes.plot(row["batch"], row["total_bytes"], "o", color=_TOTAL, markersize=6, markerfacecolor="white", zorder=5)
        label = f"b = {row['batch']}\n{size(row['total_bytes'])}"
        at = (row["batch"], row["total_bytes"])
        axes.annotate(label, at, (7, 7), textcoords="offset points", fontsize=8, bbox=_BACK, zorder=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(0.9, last * 1.15)
    _label_lines(axes, curve, weights, floor, context)
    if knee is not None:
        axes.axvline(knee, color=_KNEE, linewidth=1.2)
        _note(axes, knee, f"knee: batch {knee}", _KNEE, 0.97, left=knee > 8)
    if fits is not None and 1 <= fits <= last:
        axes.axvline(fits, color=_INK, linewidth=1.2, linestyle=(0, (2, 2)))
        _note(axes, fits, f"{numbers['device']} is full: {fits}", _INK, 0.90, left=fits > last / 2)
    _axes_texts(axes, setting, context)


def _label_lines(axes: Any, curve: Sequence[int], weights: Sequence[float], floor: float, context: int) -> None:
    """Name the lines beside them, where the eye is, instead of in a box."""
    middle = next(i for i, batch in enumerate(curve) if batch >= (curve[-1] ** 0.3))
    axes.annotate(
        "weights / batch",
        (curve[middle], weights[middle]),
        (-6, -16),
        textcoords="offset points",
        color=_WEIGHTS,
        fontsize=9,
        ha="right",
    )
    if floor > 0:
        axes.annotate(
            f"floor: KV of {context:,} tokens, {size(floor)}",
            (curve[0], floor),
            (4, -13),
            textcoords="offset points",
            color=_KV,
            fontsize=9,
        )


def _note(axes: Any, x: float, text: str, color: str, height: float, left: bool) -> None:
    axes.annotate(
        text,
        (x, height),
        (-5 if left else 5, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=color,
        fontsize=9,
        ha="right" if left else "left",
        va="top",
        bbox=_BACK,
        zorder=7,
    )


def _axes_texts(axes: Any, setting: Setting, context: int) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("bytes read for each output token")
    stored = [setting.quantization or "", f"KV {setting.kv_cache_dtype}" if setting.kv_cache_dtype != "auto" else ""]
    stored.append(f"one of {setting.tensor_parallel_size} devices" if setting.tensor_parallel_size > 1 else "")
    how = ", ".join(part for part in stored if part)
    title = f"What decode reads: {setting.shape.name} at {context:,} tokens" + (f" ({how})" if how else "")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", color="#000000", alpha=0.08)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
