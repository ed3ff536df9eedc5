"""What a claim is, and how its values are read out of what a section printed. What cannot be read is a ValueError."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report.tables import find_table, is_ours, number, tables_of

OURS = "multipack DataLoader, 1 thread"


@dataclass(frozen=True)
class Bound:
    sign: str
    limits: tuple[float, ...]

    def holds(self, values: list[float]) -> bool:
        if self.sign == ">=":
            return all(value >= limit for value, limit in zip(values, self.limits, strict=True))
        return all(value <= limit for value, limit in zip(values, self.limits, strict=True))


def at_least(*limits: float) -> Bound:
    return Bound(">=", limits)


def at_most(*limits: float) -> Bound:
    return Bound("<=", limits)


@dataclass(frozen=True)
class Claim:
    what: str
    section: str
    bound: Bound
    unit: str
    """Format of a value."""
    read: Callable[[str], list[float]]
    """Values of the claim out of a section's text."""

    def values(self, text: str) -> list[float]:
        """One value for each limit; ValueError where the text does not hold them."""
        values = self.read(text)
        if len(values) != len(self.bound.limits) or any(math.isnan(value) for value in values):
            raise ValueError(f"values {values} for {len(self.bound.limits)} limits.")
        return values


def cells(table: str, column: str, *rows: str) -> Callable[[str], list[float]]:
    return lambda text: [find_table(text, table).number(row, column) for row in rows]


def column(table: str, name: str) -> Callable[[str], list[float]]:
    return lambda text: [number(value) for value in find_table(text, table).column(name)]


def pattern(expression: str) -> Callable[[str], list[float]]:
    """All groups of all matches, in their order."""

    def read(text: str) -> list[float]:
        matches = list(re.finditer(expression, text))
        if not matches:
            raise ValueError(f"nothing that was printed matches {expression!r}.")
        return [float(value.replace(",", "")) for match in matches for value in match.groups()]

    return read


def difference(expression: str) -> Callable[[str], list[float]]:
    """First group less the second."""

    def read(text: str) -> list[float]:
        first, second, *_ = pattern(expression)(text)
        return [first - second]

    return read


def step_over_alone(text: str) -> list[float]:
    """The sleeping step with our loader beside it, over the step without a loader."""
    table = find_table(text, "20 ms sleep, beside")
    whole = [table.number(row, "work ms") + table.number(row, "wait ms") for row in (OURS, "no loader")]
    return [whole[0] / whole[1]]


def over_best_rival(text: str) -> list[float]:
    table = find_table(text, "Mtok a CPU second")
    rivals = [
        number(value)
        for name, value in zip(table.column("loader"), table.column("Mtok a CPU second"), strict=True)
        if not is_ours(name)
    ]
    return [table.number(OURS, "Mtok a CPU second") / max(rivals)]


def unproved_ratio(text: str) -> list[float]:
    """Bins over the bound where bins that a proof shows to be needed do not count."""
    ratios = []
    for line in (line for line in text.splitlines() if line.startswith("- Capacity ")):
        bins, bound = pattern(r"sets: (\d+) bins, bound (\d+)")(line)
        proved = sum(int(count) for count in re.findall(r"\+(\d+) of \d+ \(proved optimal\)", line))
        ratios.append((bins - proved) / bound)
    return ratios


def of_engine(number_of_table: int, engine: str, loader: str, name: str) -> Callable[[str], list[float]]:
    """A value of the first table of throughput (the simulated step) or of the second (the trained Llama)."""

    def read(text: str) -> list[float]:
        found = [table for table in tables_of(text) if table.columns[0] == "engine"]
        cells = [
            number(cell)
            for table in found[number_of_table : number_of_table + 1]
            for row, cell in zip(table.rows, table.column(name), strict=True)
            if row[:2] == [engine, loader]
        ]
        if not cells:
            raise ValueError(f"no {name!r} of {engine}, {loader} was printed.")
        return cells

    return read
