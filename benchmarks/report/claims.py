"""The summary: what is claimed, the bound, and what was measured, read out of the sections' own tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report.tables import find_table, number, tables_of


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
    """Values of the claim out of a section's text, one for each limit."""


def cell(table: str, row: str, column: str) -> Callable[[str], list[float]]:
    return lambda text: [find_table(text, table).number(row, column)]


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
    return lambda text: [pattern(expression)(text)[0] - pattern(expression)(text)[1]]


def step_over_alone(text: str) -> list[float]:
    """The sleeping step with our loader beside it, over the step without a loader."""
    table = find_table(text, "20 ms sleep, beside")
    ours, alone = "multipack DataLoader, 1 thread", "no loader"
    whole = [table.number(row, "work ms") + table.number(row, "wait ms") for row in (ours, alone)]
    return [whole[0] / whole[1]]


def over_best_rival(text: str) -> list[float]:
    table = find_table(text, "Mtok a CPU second")
    rivals = [
        number(value)
        for name, value in zip(table.column("loader"), table.column("Mtok a CPU second"), strict=True)
        if not name.startswith("multipack") and "our parts" not in name
    ]
    return [table.number("multipack DataLoader, 1 thread", "Mtok a CPU second") / max(rivals)]


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
        table = [table for table in tables_of(text) if table.columns[0] == "engine"][number_of_table]
        place = next(i for i, column in enumerate(table.columns) if name in column)
        return [number(row[place]) for row in table.rows if row[:2] == [engine, loader]]

    return read


RIVAL = "against the fastest rival"
OURS = "multipack DataLoader, 1 thread"

EFFICIENCIES = pattern(r"Epoch of 10\^6 rows.*efficiency ([\d.]+)%")
"""In the order of the benchmark: log-normal at 4096 and 65536, heavy tail at 32768 and 65536."""

CLAIMS = [
    Claim(
        "best-fit decreasing, times as fast as lightbinpack's `obfd` at 10^4, 10^5, 10^6 sequences, equal bins",
        "packing",
        at_least(8, 8, 4),
        "{:.0f}x",
        column(RIVAL, "times faster"),
    ),
    Claim(
        "`stream`, ns a sequence at 10^6 log-normal lengths",
        "packing",
        at_most(25),
        "{:.1f} ns",
        cell("Time a sequence", "log-normal, 4096", "stream ns"),
    ),
    Claim(
        "`stream`, correlation of position and length",
        "packing",
        at_most(0.005),
        "{:.5f}",
        lambda text: [abs(pattern(r"position and length ([-+][\d.]+)")(text)[0])],
    ),
    Claim(
        "`auto`, ns a row at 10^6 rows: log-normal; uniform, bimodal, triplets",
        "packing",
        at_most(25, 150, 150, 150),
        "{:.0f} ns",
        lambda text: [
            find_table(text, "Time a sequence").number(row, "auto ns")
            for row in ("log-normal, 4096", "uniform", "bimodal", "triplets")
        ],
    ),
    Claim(
        "`auto`, ns a row on the slowest real set, repeated to 10^6 rows",
        "quality",
        at_most(60),
        "{:.0f} ns",
        pattern(r"Slowest set.*\*\*(\d+) ns\*\*"),
    ),
    Claim(
        "real sets at 2048 and 8192: bins over the bound",
        "quality",
        at_most(1.002, 1.002),
        "{:.5f}",
        pattern(r"ratio \*\*([\d.]+)\*\*"),
    ),
    Claim(
        "the same, less the bins above the bound that a proof shows to be needed",
        "quality",
        at_most(1.002, 1.002),
        "{:.5f}",
        unproved_ratio,
    ),
    Claim(
        "the same, bins more than best-fit decreasing on the worst set",
        "quality",
        at_most(1, 1),
        "{:.0f}",
        pattern(r"at most (\d+) bins more"),
    ),
    Claim(
        "Falkenauer U and T, bins above the optimum (first-fit decreasing: 192 and 881)",
        "quality",
        at_most(100, 110),
        "{:.0f}",
        lambda text: [
            find_table(text, "auto: bins too many").number(row, "auto: bins too many")
            for row in ("falkenauer_u", "falkenauer_t")
        ],
    ),
    Claim(
        "the same, slowest instance",
        "quality",
        at_most(2, 2),
        "{:.2f} ms",
        lambda text: [
            find_table(text, "auto: bins too many").number(row, "slowest instance ms")
            for row in ("falkenauer_u", "falkenauer_t")
        ],
    ),
    Claim(
        "pairs that meet again in the next epoch, over next-fit on a shuffle: log-normal, heavy tail",
        "quality",
        at_most(1.5, 1.5),
        "{:.2f}x",
        lambda text: [
            number(row[-1]) for row in find_table(text, "pairs that meet again").rows if row[1] == "auto"
        ],
    ),
    Claim(
        "efficiency of an epoch of 10^6 rows: log-normal at 4096; heavy tail at 32768 and at 65536",
        "planning",
        at_least(99.99, 99.99, 99.99),
        "{:.4f} %",
        lambda text: [value for i, value in enumerate(EFFICIENCIES(text)) if i != 1],
    ),
    Claim(
        "the same, log-normal at 65536",
        "planning",
        at_least(99.99),
        "{:.4f} %",
        lambda text: [EFFICIENCIES(text)[1]],
    ),
    Claim(
        "bins of that epoch more than the fewest possible",
        "planning",
        at_most(0),
        "{:.0f}",
        difference(r"capacity 65536: (\d+) bins \(bound (\d+)\)"),
    ),
    Claim(
        "exact length of a plan of 10^7 rows",
        "planning",
        at_most(1.0),
        "{:.2f} s",
        pattern(r"bins\) after ([\d.]+) s more"),
    ),
    Claim(
        "any batch of it by its place, median",
        "planning",
        at_most(10),
        "{:.1f} ms",
        pattern(r"at a random place ([\d.]+) ms"),
    ),
    Claim(
        "its memory beyond the lengths",
        "planning",
        at_most(8),
        "{:.2f} bytes a row",
        pattern(r"grew by ([\d.]+) bytes"),
    ),
    Claim(
        "forecast of 10^11 rows from a histogram",
        "planning",
        at_most(100),
        "{:.1f} ms",
        pattern(r"from a histogram: ([\d.]+) ms"),
    ),
    Claim(
        "sets of rows of all steps on 1, 3, 8, 64 ranks in two processes: different digests",
        "planning",
        at_most(1),
        "{:.0f}",
        lambda text: [float(len(re.findall(r"'[0-9a-f]{16}'", text)))],
    ),
    Claim(
        "balance, heavy tail, 64 ranks x 16: slowest rank over the mean, `sorted` (dealt in turn: 1.45)",
        "balance",
        at_most(1.02),
        "{:.4f}",
        cell("ranks, accumulate", "64, 16", "sorted"),
    ),
    Claim(
        "the same, `lpt`",
        "balance",
        at_most(1.005),
        "{:.5f}",
        cell("ranks, accumulate", "64, 16", "lpt"),
    ),
    Claim(
        "batch of 65,536 tokens, CPU: trl in torch's loader over ours, equal tensors",
        "collate",
        at_least(50),
        "{:.0f}x",
        cell("CPU time of a batch", "trl in torch's loader", "x ours"),
    ),
    Claim(
        "the same, ours over one copy of its bytes",
        "collate",
        at_most(3),
        "{:.2f}x",
        lambda text: [1 / find_table(text, "CPU time of a batch").number("copy", "x ours")],
    ),
    Claim(
        "tokens a CPU second over the best of torch (0, 1, 2 workers), StatefulDataLoader, spdl, grain",
        "loading",
        at_least(10),
        "{:.0f}x",
        over_best_rival,
    ),
    Claim(
        "torch's own DataLoader over our parts, over torch + trl",
        "loading",
        at_least(20),
        "{:.0f}x",
        cell("Mtok a CPU second", "torch DataLoader over our parts", "x torch + trl"),
    ),
    Claim(
        "first batch of 10^6 rows after imports: samplers, loader and batch",
        "loading",
        at_most(0.3),
        "{:.3f} s",
        lambda text: [sum(pattern(r"samplers and loader (\d+) ms, first batch (\d+) ms")(text)) / 1e3],
    ),
    Claim(
        "a 20 ms sleeping step with our loader beside it, over alone",
        "overlap",
        at_most(1.02),
        "{:.4f}x",
        step_over_alone,
    ),
    Claim(
        "its data-wait share, warm page cache",
        "overlap",
        at_most(1),
        "{:.2f} %",
        cell("20 ms sleep, beside", OURS, "wait share"),
    ),
    Claim(
        "its data-wait share, cold page cache (reported; the bound is that of a warm one)",
        "overlap",
        at_most(1),
        "{:.2f} %",
        cell("20 ms sleep, beside our loader", "cold page cache", "wait share"),
    ),
    Claim(
        "3,000 tiny operations with our loader beside them, over alone",
        "overlap",
        at_most(1.10),
        "{:.2f}x",
        cell("3,000 tiny operations, beside", OURS, "x alone"),
    ),
    Claim(
        "simulated step of 20 ms, zero2: samples/s over torch DataLoader + trl packed",
        "throughput",
        at_least(1.2),
        "{:.2f}x",
        of_engine(0, "zero2", "trl packed", "by samples/s"),
    ),
    Claim(
        "the same, data-wait share of multipack",
        "throughput",
        at_most(1),
        "{:.1f} %",
        of_engine(0, "zero2", "multipack", "data wait"),
    ),
    Claim(
        "tiny Llama on the CPU, 1 rank: samples/s of packed over padded batches",
        "throughput",
        at_least(1.5),
        "{:.2f}x",
        of_engine(1, "1 rank", "padded", "by samples/s"),
    ),
    Claim(
        "the main job, 2 ranks, from start to exported model",
        "main_job",
        at_most(90),
        "{:.0f} s",
        column("whole job s", "whole job s"),
    ),
    Claim(
        "the same, its loss falls by",
        "main_job",
        at_least(33.3),
        "{:.0f} %",
        column("whole job s", "it fell by"),
    ),
    Claim(
        "PPO: update samples/s of packed over padded, varied prompts",
        "ppo",
        at_least(1.4),
        "{:.2f}x",
        cell("compared, alternating", "update samples/s", "ratio"),
    ),
    Claim(
        "the same, difference of the loss",
        "ppo",
        at_most(1e-5),
        "{:.1e}",
        pattern(r"packed against padded: ([\d.e+-]+) apart"),
    ),
    Claim(
        "soak: growth of resident memory over batches, epochs, restarts",
        "soak",
        at_most(8, 8, 8),
        "{:.2f} MB",
        column("growth MB by the slope", "growth MB by the slope"),
    ),
]
