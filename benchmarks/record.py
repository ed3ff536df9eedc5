"""What a benchmark found: one value a record. Tables, summary, pictures and the README's figures are made
from records.

A benchmark started by a person prints its records; the report names a file in `MULTIPACK_RECORDS`, which gets
each of them as a line of JSON.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import machine

FILE = "MULTIPACK_RECORDS"
MACHINE = "MULTIPACK_MACHINE"
"""The name of the machine, which a process that is pinned to one of its cores cannot know."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A value with the spread of its runs and where it was measured."""

    name: str
    """`table | row | column`."""
    value: float
    """The median of the runs."""
    unit: str
    """Also in the head of the column; "x" for ratios, "" for counts."""
    low: float | None = None
    """The smallest run; None where there was one run, or the value does not vary."""
    high: float | None = None
    machine: str
    commit: str

    @property
    def parts(self) -> tuple[str, str, str]:
        table, row, column = self.name.split(" | ")
        return table, row, column

    @property
    def text(self) -> str:
        spread = ""
        if self.low is not None and self.high is not None:
            spread = f" ({number(self.low, self.unit)} to {number(self.high, self.unit)})"
        return number(self.value, self.unit) + spread


def record(table: str, row: str, column: str, values: npt.ArrayLike, unit: str = "") -> None:
    """Note a value, or the median of several runs with the smallest and the largest of them."""
    runs: list[float] = np.atleast_1d(np.asarray(values, np.float64)).tolist()
    if not all(map(math.isfinite, runs)):
        raise ValueError(
            f"{table}, {row}, {column}: {runs} is no measurement. Leave out what was not measured."
        )
    spread = {"low": min(runs), "high": max(runs)} if len(runs) > 1 else {}
    found = Record(
        name=f"{table} | {row} | {column}",
        value=statistics.median(runs),
        unit=unit,
        **spread,
        machine=_where()[0],
        commit=_where()[1],
    )
    _ = found.parts  # refuses a separator in a name
    if FILE in os.environ:
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    else:
        print(f"{found.name}: {found.text} {unit}".rstrip())


def number(value: float, unit: str = "") -> str:
    """Three digits, or two of the distance to 100 % or 1x; all digits before the point."""
    whole = {"%": 100.0, "x": 1.0}.get(unit, 0.0)
    near = 0 < abs(value - whole) < 0.05 * whole
    gap, digits = (abs(value - whole), 1) if near else (abs(value), 2)
    if not near and (value == 0 or gap >= 1000 or value == round(value)):
        return f"{value:,.0f}"
    if gap < 1e-4 and not near:
        return f"{value:.1e}"
    text = f"{value:.{max(0, digits - math.floor(math.log10(gap)))}f}"
    return text.rstrip("0") if near else text


@functools.cache
def _where() -> tuple[str, str]:
    return os.environ.get(MACHINE) or machine.name(), machine.commit()
