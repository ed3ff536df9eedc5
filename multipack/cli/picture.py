"""Draw an inspection: the lengths, some padded and some packed batches, and what waiting costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from multipack.cli.inspection import Inspection
from multipack.cli.words import counted

_INK, _BLUE, _ORANGE, _GREEN, _GREY, _RED = "#22303c", "#2f6fb0", "#d9822b", "#3a8f5c", "#9aa5b1", "#c0392b"
_SHADES = ("#1f4e79", "#2f6fb0", "#5b93c9", "#8db6dd")
"""Of neighbouring sequences, so that one can be told from the next."""
_PADDING = "#f0e3d3"
_BARS = 24
"""Batches in a picture."""


def draw(found: Inspection, title: str, picture: Path) -> None:
    """Write a PNG with four panels, three where there is one rank only."""
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15, hspace=0.04, wspace=0.04)
    figure = Figure(figsize=(12, 8), layout=layout, facecolor="white")
    axes: dict[str, Axes] = figure.subplot_mosaic(
        [["lengths", "balance"], ["padded", "packed"]]
        if found.balance
        else [["lengths", "lengths"], ["padded", "packed"]],
        height_ratios=(1, 1.15),
    )
    _lengths(axes["lengths"], found)
    if found.balance:
        _balance(axes["balance"], found)
    _padded(axes["padded"], found)
    _packed(axes["packed"], found)
    _same_slots(axes["padded"], axes["packed"])
    _speed_up(axes["packed"], found)
    handles = [Patch(color=_BLUE, label="tokens"), Patch(color=_PADDING, label="padding")]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=9, ncols=2)
    figure.suptitle(title, color=_INK, fontsize=13, fontweight="bold")
    figure.savefig(picture, dpi=130)


def _lengths(axis: Axes, found: Inspection) -> None:
    """Rows by length, and where the tokens are."""
    lengths = found.lengths[found.lengths > 0]
    edges = _edges(int(lengths.min()), int(lengths.max()))
    counts, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    fits = edges[:-1] <= found.question.capacity
    widths = np.diff(edges)
    axis.bar(
        edges[:-1], counts, widths, align="edge", color=np.where(fits, _BLUE, _RED), alpha=0.85, linewidth=0
    )
    axis.set_xscale("log", base=2)
    capacity = found.question.capacity
    axis.set_xlim(min(edges[0], capacity / 2), max(edges[-1], capacity * 1.15))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=True))
    axis.axvline(capacity, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axis.annotate(
        f"capacity {capacity:,}",
        (capacity, 0.5),
        (-4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="center",
        color=_INK,
        fontsize=9,
    )
    share = axis.twinx()
    share.step(edges[1:], np.cumsum(tokens) / tokens.sum(), where="pre", color=_ORANGE, linewidth=1.8)
    share.set_ylim(0, 1.02)
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    share.set_ylabel("tokens in rows up to that length", color=_ORANGE, fontsize=9)
    share.tick_params(colors=_ORANGE, labelsize=8, length=0)
    share.spines[:].set_visible(False)
    axis.set_xlabel("tokens of a row", color=_INK, fontsize=9)
    over = f", {found.rows.overlong:,} above the capacity" if found.rows.overlong else ""
    _dress(axis, f"{counted(found.rows.rows, 'row')} by length{over}")


def _edges(shortest: int, longest: int) -> NDArray[np.int64]:
    """Whole numbers in even steps of the logarithm, none twice."""
    spread = np.geomspace(shortest, longest + 1, 49)
    edges: NDArray[np.int64] = np.unique(np.floor(spread).astype(np.int64))
    return edges if len(edges) > 1 else np.array([shortest, shortest + 1])


def _padded(axis: Axes, found: Inspection) -> None:
    """Random padded batches, each laid flat: what the model computes for about the tokens of a packed
    batch."""
    question, size = found.question, found.padded.rows_per_batch
    rng = np.random.default_rng(question.seed)
    for y in range(_BARS):
        lengths = rng.choice(np.asarray(found.plan.lengths), size).astype(np.int64)
        _bar(axis, y, lengths, np.arange(size) * lengths.max(), int(size * lengths.max()))
    _dress(
        axis,
        f"padded batches of {counted(size, 'row')}, laid flat: {found.padded.padding_share:.1%} padding",
    )


def _packed(axis: Axes, found: Inspection) -> None:
    """The first batches of the epoch."""
    plan, question = found.plan, found.question
    for y in range(_BARS):
        bins = plan.bins(y * question.bins_per_batch, (y + 1) * question.bins_per_batch)
        lengths = [np.asarray(plan.lengths)[rows].astype(np.int64) for rows in bins]
        starts = [i * question.capacity + np.cumsum(row) - row for i, row in enumerate(lengths)]
        if bins:
            slots = len(bins) * question.capacity
            _bar(axis, y, np.concatenate(lengths), np.concatenate(starts), slots)
    _dress(
        axis,
        f"packed batches, the first of {counted(found.bins.bins, 'bin')}: {found.bins.efficiency:.2%} full",
    )


def _bar(axis: Axes, y: int, lengths: NDArray[np.int64], starts: NDArray[np.int64], slots: int) -> None:
    """One batch: its slots, and in them the sequences, each with another shade than its neighbours."""
    shades = [_SHADES[i % len(_SHADES)] for i in range(len(lengths))]
    line = 0.4 if len(lengths) < 100 else 0.0
    axis.broken_barh([(0, slots)], (y - 0.41, 0.82), facecolors=_PADDING, linewidth=0)
    spans = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    axis.broken_barh(spans, (y - 0.41, 0.82), facecolors=shades, edgecolor="white", linewidth=line)


def _same_slots(padded: Axes, packed: Axes) -> None:
    """Both pictures on one scale, so that the eye compares the work."""
    widest = max(padded.dataLim.x1, packed.dataLim.x1)
    for axis in (padded, packed):
        axis.set_ylim(_BARS - 0.4, -0.6)
        axis.set_xlim(0, widest)
        axis.set_yticks([])
        axis.margins(0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.xaxis.set_major_locator(MaxNLocator(4 if widest > 1e7 else 8, integer=True))
        axis.set_xlabel("token slots", color=_INK, fontsize=9)


def _speed_up(axis: Axes, found: Inspection) -> None:
    """The figure in the space that packing frees, if there is enough."""
    used = found.question.bins_per_batch * found.question.capacity / axis.get_xlim()[1]
    if used < 0.75:
        middle = (1 + used) / 2
        style: dict[str, Any] = {"transform": axis.transAxes, "ha": "center", "color": _GREEN}
        axis.text(
            middle,
            0.5,
            f"{found.padded.speed_up:.2f} x",
            fontsize=22,
            fontweight="bold",
            va="bottom",
            **style,
        )
        axis.text(middle, 0.48, "expected speed-up", fontsize=10, va="top", **style)


def _balance(axis: Axes, found: Inspection) -> None:
    """Waiting of each mode for both ways in which ranks meet."""
    places = np.arange(len(found.balance))
    kinds: tuple[tuple[str, str, str], ...] = (
        ("once_a_step", "meeting once a step (DDP, ZeRO-1/2)", _BLUE),
        ("every_micro_step", "meeting every micro-step (FSDP, ZeRO-3)", _ORANGE),
    )
    top = max(getattr(b, name) for b in found.balance for name, *_ in kinds)
    for shift, (name, label, color) in zip((-0.2, 0.2), kinds, strict=True):
        values = [getattr(balance, name) for balance in found.balance]
        bars = axis.bar(places + shift, values, 0.38, color=color, label=label, linewidth=0)
        axis.bar_label(bars, [f"{value:.2%}" for value in values], padding=2, fontsize=8, color=_INK)
    axis.set_xticks(places, [f"balance={balance.mode!r}" for balance in found.balance])
    axis.set_ylim(0, max(top * 1.45, 1e-4))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend(loc="upper right", frameon=False, fontsize=8)
    question = found.question
    batches = counted(question.accumulate, "batch", "batches")
    _dress(axis, f"time lost to the slowest of {question.ranks:,} ranks, {batches} a step")


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", color=_INK, fontsize=10)
    axis.tick_params(colors=_INK, labelsize=8, length=0)
    axis.spines[:].set_visible(False)
    axis.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
