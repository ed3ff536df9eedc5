"""Pictures of tables: bars of a column, lines over a size, parts of a step. Ours is blue everywhere, and names carry the units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from benchmarks.report.tables import Table, is_ours, number, short

Draw = Callable[[Axes, Table], None]

OURS = "#1d4ed8"
OTHERS = "#9ca3af"
LINES = ("#1d4ed8", "#0d9488", "#7c3aed", "#e11d48", "#f59e0b", "#334155")
RIVAL_LINES = ("#c2410c", "#6b7280", "#a16207", "#9ca3af", "#111827")
RIVALS = ("accelerate", "binpacking", "grain", "lightbinpack", "numba", "spdl", "torch", "trl")
"""First words of names that are not ours."""

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.labelcolor": "#374151",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 140,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "font.size": 10,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "xtick.color": "#374151",
    "ytick.color": "#374151",
}


def save_plot(path: Path, title: str, draw: Draw, table: Table) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 3.9), layout="constrained")
        try:
            draw(axes, table)
            figure.suptitle(title, x=0.01, horizontalalignment="left")
            figure.savefig(path)
        finally:
            plt.close(figure)


def digits(value: float, _: object = None) -> str:
    """A tick's label."""
    return f"{value:,.10g}"


def is_rival(name: str) -> bool:
    """In a table that may have no rival at all."""
    return name.startswith(RIVALS) and not is_ours(name)


def bars(column: str, reverse: bool = False) -> Draw:
    """One horizontal bar a row; a logarithmic axis where the largest is over thirty times the smallest."""

    def draw(axes: Axes, table: Table) -> None:
        names = [row[0] for row in table.rows]
        label = table.name(column)
        values = [number(cell) for cell in table.column(column)]
        order = sorted(range(len(values)), key=lambda i: values[i], reverse=reverse)
        drawn = axes.barh(
            [names[i] for i in order],
            [values[i] for i in order],
            color=[OURS if is_ours(names[i]) else OTHERS for i in order],
            height=0.7,
        )
        axes.bar_label(drawn, [short(values[i]) for i in order], padding=4, color="#374151")
        if max(values) > 30 * min(values) > 0:
            axes.set_xscale("log")
            axes.set_xlim(right=max(values) * 3)
            axes.xaxis.set_major_formatter(digits)
            label += ", logarithmic axis"
        else:
            axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)

    return draw


def pairs(ours: str, theirs: str) -> Draw:
    """Two columns beside each other for each row: ours, and a rival's."""

    def draw(axes: Axes, table: Table) -> None:
        places = range(len(table.rows))
        for column, colour, shift in ((ours, OURS, -0.2), (theirs, OTHERS, 0.2)):
            values = [number(cell) for cell in table.column(column)]
            drawn = axes.barh(
                [place + shift for place in places],
                values,
                height=0.38,
                color=colour,
                label=table.name(column),
            )
            axes.bar_label(drawn, [short(value) for value in values], padding=4, color="#374151")
        axes.set_yticks(places, [row[0] for row in table.rows])
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower right")

    return draw


def lines(x_label: str, y_label: str, columns: Sequence[str] | None = None) -> Draw:
    """One line a column over the first one, both axes logarithmic; dashed rivals, with gaps where one was left out."""

    def draw(axes: Axes, table: Table) -> None:
        sizes = [number(row[0]) for row in table.rows]
        ours, rivals = iter(LINES), iter(RIVAL_LINES)
        for name in columns or table.columns[1:]:
            values = [number(cell) for cell in table.column(name)]
            if is_rival(name):
                look: dict[str, Any] = {"color": next(rivals), "linestyle": "--", "linewidth": 1.4}
            else:
                look = {"color": next(ours), "linestyle": "-", "linewidth": 2.2}
            axes.plot(sizes, values, marker="o", markersize=4, label=name, **look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
        axes.xaxis.minorticks_off()
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high < 100 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.minorticks_off()
        axes.yaxis.set_major_formatter(digits)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))

    return draw


def parts(names: Sequence[str], unit: str) -> Draw:
    """Parts of a step beside each other in one bar a row."""

    def draw(axes: Axes, table: Table) -> None:
        labels, left = [row[0] for row in table.rows], [0.0] * len(table.rows)
        for name, colour in zip(names, (OURS, "#f59e0b"), strict=True):
            values = [number(cell) for cell in table.column(name)]
            axes.barh(labels, values, left=left, color=colour, height=0.7, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for place, total in enumerate(left):
            axes.text(total, place, f"  {total:.2f}", va="center", color="#374151")
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(unit)
        axes.legend(loc="lower right")

    return draw


def clusters(group: str, member: str, column: str, unit: str) -> Draw:
    """A cluster of bars for each value of the column `group`, one bar for each value of `member`."""

    def draw(axes: Axes, table: Table) -> None:
        groups = list(dict.fromkeys(table.column(group)))
        members = list(dict.fromkeys(table.column(member)))
        values = {
            (a, b): number(cell)
            for a, b, cell in zip(
                table.column(group), table.column(member), table.column(column), strict=True
            )
        }
        width = 0.8 / len(members)
        greys = iter(("#d1d5db", "#9ca3af", "#6b7280", "#4b5563"))
        for place, name in enumerate(members):
            shift = (place - (len(members) - 1) / 2) * width
            drawn = axes.bar(
                [i + shift for i in range(len(groups))],
                [values.get((a, name), math.nan) for a in groups],
                width=0.92 * width,
                color=OURS if is_ours(name) else next(greys),
                label=name,
            )
            axes.bar_label(drawn, fmt="{:,.0f}", padding=2, fontsize=8, color="#374151")
        axes.set_xticks(range(len(groups)), groups)
        axes.yaxis.set_major_formatter(digits)
        axes.margins(y=0.12)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(unit)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))

    return draw
