"""How cost grows: with the number of sequences, with the capacity of a bin, with the number of ranks.

    taskset -c 1 python -m benchmarks.growth               # everything, about a minute and a half
    taskset -c 1 python -m benchmarks.growth --parts ranks # one of the parts

A rival's packer gets one round, and is left out where the time of the size before lets expect more than five
seconds.
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
from benchmarks.record import record
from benchmarks.timing import times
from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler
from multipack.order.balance import BalanceMode, batch_cost, deal

SIZES = (10**4, 10**5, 10**6, 10**7)
CAPACITIES = (4096, 16_384, 65_536, 262_144, 1_048_576)
RANKS = (1, 8, 64, 512, 4096)
LIMIT_S = 5.0
MODES: tuple[BalanceMode, ...] = ("none", "micro_step", "step")


def nanoseconds(name: str, packer: Count, lengths: Lengths, capacity: int, rounds: int) -> list[float]:
    """Time a sequence of each round; the answers are checked."""
    counts: set[int] = set()
    seconds = times(lambda: counts.add(packer(lengths, capacity)), rounds)
    for bins in counts:
        assert_bins(name, bins, lengths, capacity)
    return [1e9 * run / len(lengths) for run in seconds]


def sequences(rounds: int) -> None:
    """Packing as the number of sequences grows: log-normal lengths, capacity 4096."""
    packers: dict[str, Count] = {
        **{f"multipack {method}": ours(method) for method in ("stream", "auto", "best_fit_decreasing")},
        **{f"lightbinpack {method}": lightbinpack(method) for method in ("obfd", "ffd")},
        "numba first-fit decreasing": numba_first_fit_decreasing,
        "trl bfd": trl(),
        "binpacking": binpacking,
    }
    numba_first_fit_decreasing(lognormal(100), 4096)  # compiles
    for size in SIZES:
        lengths = lognormal(size)
        for name, packer in list(packers.items()):
            ns = nanoseconds(name, packer, lengths, 4096, rounds if name.startswith("multipack") else 1)
            record("packing by number of sequences", f"{size:,}", name, ns, "ns a sequence")
            growth = 100 if name == "binpacking" else 10  # it looks at every open bin
            if 1e-9 * min(ns) * size * growth > LIMIT_S:
                del packers[name]


def workloads(rounds: int) -> None:
    """`auto` as the number of sequences grows, by workload."""
    for size in SIZES:
        for name, (make, capacity) in WORKLOADS.items():
            ns = nanoseconds("multipack auto", ours("auto"), make(size, capacity), capacity, rounds)
            record("auto by workload", f"{size:,}", name, ns, "ns a sequence")


def capacities(rounds: int) -> None:
    """Packing as the capacity grows: 10^6 log-normal lengths."""
    packers = {
        "multipack stream": ours("stream"),
        "multipack best_fit_decreasing": ours("best_fit_decreasing"),
        "lightbinpack obfd": lightbinpack("obfd"),
    }
    lengths = lognormal(10**6)
    for capacity in CAPACITIES:
        for name, packer in packers.items():
            ns = nanoseconds(name, packer, lengths, capacity, rounds)
            record("packing by capacity, 1,000,000 sequences", f"{capacity:,}", name, ns, "ns a sequence")


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


def plan_in_fresh_process(num_rows: int, who: str, rounds: int) -> dict[str, list[float]]:
    """What processes of one plan each say."""
    command = [sys.executable, "-c", PLAN, str(num_rows), who]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(rounds)
    ]
    return {name: [run[name] for run in runs] for name in runs[0]}


def plans(rounds: int) -> None:
    """Planning an epoch as the number of rows grows: rank 3 of 8, beside torch's samplers, which only
    shuffle."""
    table = "planning an epoch by number of rows"
    for size in SIZES:
        row = f"{size:,}"
        mine = plan_in_fresh_process(size, "multipack", rounds)
        theirs = plan_in_fresh_process(size, "torch", rounds)
        plan = EpochPlan(lognormal(size).astype(np.uint16), 4096)
        places = np.random.default_rng(0).integers(0, len(plan), 20).tolist()
        seek_ms = [1e3 * times(partial(plan.bins, place, place + 1), 1)[0] for place in places]
        record(table, row, "first batch", mine["first_ms"], "ms")
        record(table, row, "exact length, more", mine["length_ms"], "ms")
        record(table, row, "any batch by its place", seek_ms, "ms")
        record(table, row, "memory", mine["bytes_a_row"], "bytes a row")
        record(table, row, "torch DistributedSampler: first batch", theirs["first_ms"], "ms")
        record(table, row, "torch DistributedSampler: memory", theirs["bytes_a_row"], "bytes a row")


def ranks(rounds: int) -> None:
    """Dealing as the number of ranks grows: 10^6 log-normal rows, capacity 4096, accumulate 4; a step of
    heavy-tailed bins."""
    lengths = lognormal(10**6)
    costs = batch_cost(*EpochPlan(heavy_tail(10**6), 32768).costs(0, 40_000))

    def first_batch(mode: Any, num_replicas: int) -> Any:
        sampler = DistributedBatchSampler(
            MultipackBatchSampler(lengths, 4096),
            num_replicas=num_replicas,
            rank=num_replicas - 1,
            accumulate=4,
            balance=mode,
        )
        return next(iter(sampler))

    for num_replicas in RANKS:
        row, step = f"{num_replicas:,}", costs[: num_replicas * 4]
        for mode in MODES:
            seconds = times(partial(first_batch, mode, num_replicas), rounds)
            record(
                "dealing by number of ranks", row, f"first batch, {mode}", [1e3 * s for s in seconds], "ms"
            )
        for mode in MODES[1:]:
            seconds = times(partial(deal, step, num_replicas, mode), rounds)
            record("dealing by number of ranks", row, f"a step, {mode}", [1e3 * s for s in seconds], "ms")


PARTS: dict[str, Callable[[int], None]] = {
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.parts:
        PARTS[name](arguments.rounds)


if __name__ == "__main__":
    main()
