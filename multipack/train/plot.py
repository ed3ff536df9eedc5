"""Draw a run from its metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

_INK, _BLUE, _ORANGE, _GREEN, _GREY = "#22303c", "#2f6fb0", "#d9822b", "#3a8f5c", "#9aa5b1"
Records = Sequence[dict[str, Any]]


def plot_run(metrics_file: Path, picture: Path) -> None:
    """Four panels by step: loss, tokens a second, padding and data-wait shares, bin fill.

    Args:
        metrics_file: lines as `MetricsLog` writes them.
        picture: PNG file to write; left alone when no step was logged.
    """
    records = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        return
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(11, 7), layout=layout, facecolor="white")
    axes = figure.subplots(2, 2, sharex=True)
    _loss(axes[0, 0], train, [record for record in records if record["kind"] == "eval"])
    _speed(axes[0, 1], train)
    _shares(axes[1, 0], train)
    _fill(axes[1, 1], train)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step", color=_INK)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(_title(train), color=_INK, fontsize=11)
    figure.savefig(picture, dpi=130)


def _loss(axis: Axes, train: Records, evaluations: Records) -> None:
    _line(axis, *_series(train, "loss"), color=_BLUE, label="training")
    steps, losses = _series(evaluations, "loss")
    if losses:
        axis.plot(steps, losses, color=_ORANGE, marker="o", markersize=5, linewidth=1.5, label="validation")
    _dress(axis, "loss of a target token (nats)", legend="upper right")


def _speed(axis: Axes, train: Records) -> None:
    steps, speeds = _series(train, "tokens_per_s")
    middle = median(speeds)
    _line(axis, steps, speeds, color=_GREEN)
    axis.axhline(middle, color=_INK, linewidth=1, linestyle=(0, (4, 3)), label=f"median {middle:,.0f}")
    axis.set_ylim(0, max(middle * 1.5, max(speeds) * 1.1))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _dress(axis, "tokens a second, all ranks", legend="lower right")


def _shares(axis: Axes, train: Records) -> None:
    top = 0.05
    for name, label, color in (("padding_share", "padding", _ORANGE), ("wait_share", "data wait", _BLUE)):
        steps, shares = _series(train, name)
        _line(axis, steps, shares, color=color, label=f"{label}, mean {fmean(shares):.2%}")
        top = max(top, *shares)
    axis.set_ylim(0, top * 1.15)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(axis, "slots that held padding, time spent waiting for data", legend="upper right")


def _fill(axis: Axes, train: Records) -> None:
    steps, fills = _series(train, "bin_fill")
    low = min(fills)
    bottom = max(0.0, 1.0 - 2.0 * max(0.01, 1.0 - low))
    axis.fill_between(steps, fills, bottom, color=_GREEN, alpha=0.12, linewidth=0)
    _line(axis, steps, fills, color=_GREEN, label=f"mean {fmean(fills):.2%}, lowest {low:.2%}")
    axis.axhline(1.0, color=_GREY, linewidth=1)
    axis.set_ylim(bottom, 1.0 + (1.0 - bottom) * 0.05)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(axis, "bin fill: tokens over capacity", legend="lower right")


def _line(axis: Axes, steps: Sequence[int], values: Sequence[float], *, color: str, label: str = "") -> None:
    """The values, faint, under their running mean."""
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    axis.plot(steps, _smoothed(values), color=color, linewidth=2, label=label or None)


def _dress(axis: Axes, title: str, *, legend: str) -> None:
    """Title, legend and quiet axes."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, labelcolor=_INK, loc=legend, fontsize=9)
    axis.set_title(title, loc="left", fontsize=10, color=_INK)
    axis.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.8)
    axis.tick_params(colors=_INK, labelsize=9, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_GREY)
    axis.margins(x=0.01)


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one number, those that were not finite left out."""
    points = [(record["step"], record[name]) for record in records if record[name] is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over a twentieth of the run, centred."""
    half = len(values) // 40
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _title(train: Records) -> str:
    seconds = sum(record["seconds"] for record in train)
    tokens, samples = (
        sum(record["num_tokens"] for record in train),
        sum(record["num_sequences"] for record in train),
    )
    return (
        f"{train[-1]['step']:,} steps    {samples:,} samples    {tokens:,} tokens    {seconds:,.0f} s    "
        f"{samples / seconds:,.1f} samples/s    {tokens / seconds:,.0f} tokens/s"
    )
