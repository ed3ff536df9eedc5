"""How cost grows: with the number of sequences, with the capacity of a bin, with the number of ranks.

    taskset -c 1 python -m benchmarks.growth                # all tables, about a minute and a half
    taskset -c 1 python -m benchmarks.growth --tables ranks # one of them

Times are the best of the rounds (`--rounds`, 3). A packer is left out (-) where the
time of the size before lets expect more than five seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.length_sets import WORKLOADS, Lengths, heavy_tail, lognormal
from benchmarks.packing_rivals import (
    Count,
    assert_bins,
    binpacking,
    lightbinpack,
    numba_first_fit_decreasing,
    ours,
    trl,
)
from benchmarks.planning import seconds
from benchmarks.report.tables import markdown_table, short
from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler
from multipack.order.balance import batch_cost, deal

SIZES = (10**4, 10**5, 10**6, 10**7)
CAPACITIES = (4096, 16_384, 65_536, 262_144, 1_048_576)
RANKS = (1, 8, 64, 512, 4096)
LIMIT_S = 5.0


def nanoseconds(name: str, packer: Count, lengths: Lengths, capacity: int, rounds: int) -> float:
    """Best time a sequence; the answers are checked."""
    counts: set[int] = set()
    best, _ = seconds(lambda: counts.add(packer(lengths, capacity)), rounds)
    for bins in counts:
        assert_bins(name, bins, lengths, capacity)
    return 1e9 * best / len(lengths)


def sequences(rounds: int) -> None:
    """Packing as the number of sequences grows: ns a sequence, log-normal lengths, capacity 4096."""
    packers: dict[str, Count] = {
        **{f"multipack {method}": ours(method) for method in ("stream", "auto", "best_fit_decreasing")},
        **{f"lightbinpack {method}": lightbinpack(method) for method in ("obfd", "ffd")},
        "numba first-fit decreasing": numba_first_fit_decreasing,
        "trl bfd": trl(),
        "binpacking": binpacking,
    }
    numba_first_fit_decreasing(lognormal(100), 4096)  # compiles
    slow: set[str] = set()
    rows = []
    for size in SIZES:
        lengths = lognormal(size)
        row = [f"{size:,}"]
        for name, packer in packers.items():
            if name in slow:
                row.append("-")
                continue
            ns = nanoseconds(name, packer, lengths, 4096, rounds if name.startswith("multipack") else 1)
            row.append(f"{ns:.1f}")
            growth = 100 if name == "binpacking" else 10  # it looks at every open bin
            if 1e-9 * ns * size * growth > LIMIT_S:
                slow.add(name)
        rows.append(row)
    print(markdown_table(["sequences", *packers], rows))


def workloads(rounds: int) -> None:
    """`auto` as the number of sequences grows, by workload: ns a sequence."""
    rows = []
    for size in SIZES:
        row = [f"{size:,}"]
        for make, capacity in WORKLOADS.values():
            ns = nanoseconds("multipack auto", ours("auto"), make(size, capacity), capacity, rounds)
            row.append(f"{ns:.1f}")
        rows.append(row)
    print(markdown_table(["sequences", *WORKLOADS], rows))


def capacities(rounds: int) -> None:
    """Packing as the capacity grows: ns a sequence, 10^6 log-normal lengths."""
    packers = {
        "multipack stream": ours("stream"),
        "multipack best_fit_decreasing": ours("best_fit_decreasing"),
        "lightbinpack obfd": lightbinpack("obfd"),
    }
    lengths = lognormal(10**6)
    rows = []
    for capacity in CAPACITIES:
        times = (nanoseconds(name, packer, lengths, capacity, rounds) for name, packer in packers.items())
        rows.append([f"{capacity:,}", *(f"{ns:.1f}" for ns in times)])
    print(markdown_table(["capacity", *packers], rows))


PLAN = """
import json, sys, time
import numpy as np, torch
from benchmarks.length_sets import lognormal
from benchmarks.planning import memory_kib
from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler
num_rows, who = int(sys.argv[1]), sys.argv[2]
lengths = lognormal(num_rows).astype(np.uint16)
def plan():
    if who == "multipack":
        sampler = DistributedBatchSampler(MultipackBatchSampler(lengths, 4096), num_replicas=8, rank=3)
    else:
        rows = torch.utils.data.DistributedSampler(range(num_rows), num_replicas=8, rank=3)
        sampler = torch.utils.data.BatchSampler(rows, 12, drop_last=False)
    return sampler, next(iter(sampler))
started = time.perf_counter()
sampler, _ = plan()
first = time.perf_counter()
length = len(sampler)
ended = time.perf_counter()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here, and all code has been loaded
before = memory_kib("VmRSS")
kept = plan()
length = len(kept[0])
grown = memory_kib("VmHWM") - before
print(json.dumps({"first_ms": 1e3 * (first - started), "length_ms": 1e3 * (ended - first), "bytes_a_row": 1024 * grown / num_rows}))
"""


def plan_in_fresh_process(num_rows: int, who: str, rounds: int) -> dict[str, float]:
    """Medians over processes of one plan each."""
    runs = []
    for _ in range(rounds):
        command = [sys.executable, "-c", PLAN, str(num_rows), who]
        runs.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def plans(rounds: int) -> None:
    """Planning an epoch as the number of rows grows: rank 3 of 8, beside torch's samplers, which only shuffle."""
    rows = []
    for size in SIZES:
        mine = plan_in_fresh_process(size, "multipack", rounds)
        theirs = plan_in_fresh_process(size, "torch", rounds)
        plan = EpochPlan(lognormal(size).astype(np.uint16), 4096)
        places = np.random.default_rng(0).integers(0, len(plan), 20).tolist()
        seek_ms = 1e3 * np.median([seconds(partial(plan.bins, place, place + 1), 1)[0] for place in places])
        rows.append(
            [
                f"{size:,}",
                short(mine["first_ms"]),
                short(mine["length_ms"]),
                short(float(seek_ms)),
                f"{mine['bytes_a_row']:.1f}",
                short(theirs["first_ms"]),
                f"{theirs['bytes_a_row']:.1f}",
            ]
        )
    columns = [
        "rows",
        "first batch ms",
        "exact length ms more",
        "batch at a random place ms",
        "bytes a row",
        "torch DistributedSampler: first batch ms",
        "torch DistributedSampler: bytes a row",
    ]
    print(markdown_table(columns, rows))


def ranks(rounds: int) -> None:
    """Dealing as the number of ranks grows: 10^6 log-normal rows, capacity 4096, accumulate 4; heavy tail for the dealing of a step."""
    lengths = lognormal(10**6)
    costs = batch_cost(*EpochPlan(heavy_tail(10**6), 32768).costs(0, 40_000))
    rows = []
    for num_replicas in RANKS:

        def first_batch(mode: Any, num_replicas: int = num_replicas) -> Callable[[], Any]:
            def run() -> Any:
                source = MultipackBatchSampler(lengths, 4096)
                sampler = DistributedBatchSampler(
                    source, num_replicas=num_replicas, rank=num_replicas - 1, accumulate=4, balance=mode
                )
                return next(sampler.read())

            return run

        step = costs[: num_replicas * 4]
        rows.append(
            [
                f"{num_replicas:,}",
                *(
                    f"{1e3 * seconds(first_batch(mode), rounds)[0]:.2f}"
                    for mode in ("none", "micro_step", "step")
                ),
                *(
                    f"{1e3 * seconds(partial(deal, step, num_replicas, mode), rounds)[0]:.3f}"
                    for mode in ("micro_step", "step")
                ),
            ]
        )
    columns = [
        "ranks",
        "first batch ms, in turn",
        "first batch ms, sorted",
        "first batch ms, lpt",
        "sorted, ms a step",
        "lpt, ms a step",
    ]
    print(markdown_table(columns, rows))


TABLES: dict[str, Callable[[int], None]] = {
    "sequences": sequences,
    "workloads": workloads,
    "capacities": capacities,
    "plans": plans,
    "ranks": ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.tables:
        print(f"\n### {(TABLES[name].__doc__ or '').splitlines()[0]}\n")
        TABLES[name](arguments.rounds)


if __name__ == "__main__":
    main()
