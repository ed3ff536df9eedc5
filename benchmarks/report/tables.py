"""Markdown tables: read from what benchmarks print, and made from the JSON of pytest-benchmark.

All figures of the report, its plots and its summary are read from these tables, so that they cannot differ.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Table:
    """One Markdown table, and the nearest heading above it."""

    heading: str
    columns: list[str]
    rows: list[list[str]]

    def name(self, name: str) -> str:
        """The whole name of the column `name`, or else of the first one that contains it."""
        return self.columns[self._place(name)]

    def column(self, name: str) -> list[str]:
        """Cells below that column."""
        return [row[self._place(name)] for row in self.rows]

    def cell(self, row: str, column: str) -> str:
        """The cell of the first row whose first cell begins with `row`."""
        place = self._place(column)
        for cells in self.rows:
            if cells[0].startswith(row):
                return cells[place]
        raise ValueError(f"no row {row!r} in the table {self.heading or self.columns[0]!r}.")

    def number(self, row: str, column: str) -> float:
        return number(self.cell(row, column))

    def _place(self, name: str) -> int:
        if name in self.columns:
            return self.columns.index(name)
        for place, column in enumerate(self.columns):
            if name in column:
                return place
        raise ValueError(f"no column {name!r} among {self.columns}.")


def number(cell: str) -> float:
    """The first number of a cell; NaN for a cell of none, as in a rival that was left out."""
    found = re.search(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?", cell)
    return float(found[0].replace(",", "")) if found else float("nan")


def is_ours(name: str) -> bool:
    """In a table of rivals."""
    return "multipack" in name or "over our parts" in name


def tables_of(markdown: str) -> list[Table]:
    tables, heading = [], ""
    for is_table, lines in groupby(markdown.splitlines(), lambda line: line.startswith("|")):
        block = list(lines)
        if is_table:
            columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block]
            tables.append(Table(heading, columns, rows))
        for line in block:
            if line.startswith("#"):
                heading = line.lstrip("# ")
    return tables


def separated(markdown: str) -> str:
    """The same text with an empty line before and after each table, as Markdown wants it."""
    lines = markdown.splitlines()
    spaced: list[str] = []
    for place, line in enumerate(lines):
        is_header = line.startswith("|") and place + 1 < len(lines) and lines[place + 1].startswith("|--")
        after_table = bool(spaced) and spaced[-1].startswith("|") and not line.startswith("|")
        if spaced and spaced[-1] and (is_header or after_table):
            spaced.append("")
        spaced.append(line)
    return "\n".join(spaced)


def find_table(markdown: str, name: str) -> Table:
    """The first table with `name` in its heading or in one of its columns."""
    for table in tables_of(markdown):
        if name in table.heading or any(name in column for column in table.columns):
            return table
    raise ValueError(f"no table about {name!r} was printed.")


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def benchmark_groups(benchmarks: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each group of pytest-benchmark, slowest last: the ratio to our first entry, then the time and its spread.

    Where ours is missing, because its answer was wrong, there are no ratios.
    """
    for group in dict.fromkeys(str(entry["group"]) for entry in benchmarks):
        entries = [entry for entry in benchmarks if entry["group"] == group]
        ours = next((entry for entry in entries if _name(entry).startswith("multipack")), None)
        entries.sort(key=lambda entry: float(entry["stats"]["median"]))
        scale, unit = _unit(entry["stats"]["median"] for entry in entries)
        more = list(dict.fromkeys(name for entry in entries for name in entry["extra_info"]))
        rows = []
        for entry in entries:
            stats = entry["stats"]
            ratio = f"**{short(stats['median'] / ours['stats']['median'])}**" if ours else "-"
            rows.append(
                [
                    _name(entry),
                    "1" if entry is ours else ratio,
                    short(scale * stats["median"]),
                    f"{short(scale * stats['min'])} to {short(scale * stats['max'])}",
                    str(stats["rounds"]),
                    *(str(entry["extra_info"].get(name, "")) for name in more),
                ]
            )
        columns = [
            group,
            f"x {_name(ours) if ours else 'multipack'}",
            f"median {unit}",
            "smallest to largest",
            "rounds",
            *more,
        ]
        yield markdown_table(columns, rows)


def short(value: float) -> str:
    """Three digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _name(entry: dict[str, Any]) -> str:
    if entry["params"]:
        return str(entry["params"]["name"])
    return str(entry["name"]).removeprefix("test_").replace("_", " ")


def _unit(seconds: Iterable[float]) -> tuple[float, str]:
    middle = statistics.median(seconds)
    return (1e6, "us") if middle < 1e-3 else (1e3, "ms") if middle < 1 else (1.0, "s")
