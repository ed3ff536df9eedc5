"""The report's five pictures, drawn from records: bars of a column, lines over a size. Ours is blue
everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.record import Record, number

OURS = ("#1d4ed8", "#0d9488", "#7c3aed")
RIVALS = ("#c2410c", "#6b7280", "#a16207", "#9ca3af", "#111827")
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 110,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
}


class Picture(NamedTuple):
    name: str
    table: str
    title: str
    column: str = ""
    """Bars of this column, a bar a row; where empty, a line a column over the rows' sizes."""


PICTURES = (
    Picture("packers", "pack 1,000,000 sequences", "Packing 1,000,000 sequences", "time"),
    Picture("growth", "packing by number of sequences", "Packing time by number of sequences"),
    Picture("loading", "tokens a CPU second", "Tokens a second of CPU, from disk to batches", "of CPU"),
    Picture("beside", "a step of 3,000 tiny operations", "3,000 tiny operations beside a loader", "work"),
    Picture(
        "training",
        "samples a second, step simulated by 20 ms of sleep",
        "Training on 2 ranks, step simulated by 20 ms of sleep",
        "samples/s",
    ),
)


def is_ours(name: str) -> bool:
    return "multipack" in name or "over our parts" in name


def draw(path: Path, picture: Picture, records: Sequence[Record]) -> bool:
    """Save a picture of its table's records; False, and no file, where there are none."""
    chosen = [record for record in records if picture.column in ("", record.parts[2])]
    if not chosen:
        return False
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 3.9), layout="constrained")
        (bars if picture.column else lines)(axes, chosen)
        figure.suptitle(picture.title, x=0.01, horizontalalignment="left")
        figure.savefig(path)
        plt.close(figure)
    return True


def bars(axes: Axes, records: Sequence[Record]) -> None:
    """One horizontal bar a row, sorted; a logarithmic axis where the largest is over thirty times the
    smallest."""
    ordered = sorted(records, key=lambda record: record.value)
    names, values = [record.parts[1] for record in ordered], [record.value for record in ordered]
    drawn = axes.barh(
        names, values, color=[OURS[0] if is_ours(name) else RIVALS[3] for name in names], height=0.7
    )
    axes.bar_label(drawn, [number(value) for value in values], padding=4)
    label = records[0].unit or records[0].parts[2]
    if values[-1] > 30 * values[0] > 0:
        axes.set_xscale("log")
        axes.set_xlim(right=values[-1] * 3)
        label += ", logarithmic axis"
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def lines(axes: Axes, records: Sequence[Record]) -> None:
    """One line a column over the rows' sizes, both axes logarithmic; dashed rivals, which end where they were
    left out."""
    ours, rivals = iter(OURS), iter(RIVALS)
    for column in dict.fromkeys(record.parts[2] for record in records):
        of = [record for record in records if record.parts[2] == column]
        if is_ours(column):
            look: dict[str, Any] = {"color": next(ours), "linewidth": 2.2}
        else:
            look = {"color": next(rivals), "linestyle": "--", "linewidth": 1.4}
        sizes = [int(record.parts[1].replace(",", "")) for record in of]
        axes.plot(sizes, [record.value for record in of], marker="o", markersize=4, label=column, **look)
    axes.set(xscale="log", yscale="log", ylabel=records[0].unit)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
