"""Packing, planning and balance: how full, how fast, how random.

    taskset -c 1 python -m benchmarks.planning            # everything, about three minutes
    taskset -c 1 python -m benchmarks.planning quality    # one of the parts

Ratios are between what took turns in this run; "radix sorts" is time over that of a radix sort of the same
lengths (`probes.py`).
"""

from __future__ import annotations

import bisect
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.length_sets import (
    WORKLOADS,
    Lengths,
    bin_packing_instances,
    heavy_tail,
    lognormal,
    real_sets,
)
from benchmarks.packing_rivals import lightbinpack
from benchmarks.probes import dependent_load_ns, radix_sort
from benchmarks.record import record
from benchmarks.timing import in_turns, over, times
from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler, forecast, pack
from multipack.order.balance import BalanceMode, batch_cost, deal, loss_of_balance
from multipack.order.packing import MethodName, Packing

METHODS: tuple[MethodName, ...] = ("stream", "auto", "best_fit_decreasing")


def memory_kib(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field))


def pairs_optimum(lengths: Any, capacity: int) -> int | None:
    """Fewest bins where every length exceeds a third of a bin, so that a bin holds two at most; None
    elsewhere.

    Then the longest with the longest that fits is a largest matching, so the count is proved.
    """
    if lengths.min() * 3 <= capacity:
        return None
    left = np.sort(lengths).tolist()
    bins = 0
    while left:
        longest = left.pop()
        bins += 1
        fits = bisect.bisect_right(left, capacity - longest)
        if fits:
            left.pop(fits - 1)
    return bins


def assert_packs(packing: Packing, lengths: Lengths, capacity: int) -> None:
    """Every sequence once, no bin above its capacity."""
    assert np.array_equal(np.bincount(packing.indices, minlength=len(lengths)), np.ones(len(lengths)))
    sums = np.add.reduceat(lengths[packing.indices], packing.offsets[:-1], dtype=np.int64)
    assert sums.max() <= capacity


def rival() -> None:
    """Best-fit decreasing against the fastest rival, in turns."""
    theirs, table = lightbinpack("obfd"), "best-fit decreasing against lightbinpack obfd"
    for num_rows in (10**4, 10**5, 10**6):
        lengths = lognormal(num_rows)
        bins = len(pack(lengths, 4096, method="best_fit_decreasing"))
        assert bins == theirs(lengths, 4096)
        ours = partial(pack, lengths, 4096, method="best_fit_decreasing")
        seconds = in_turns({"ours": ours, "theirs": partial(theirs, lengths, 4096)}, 7)
        row = f"{num_rows:,} rows"
        record(table, row, "times as fast", over(seconds["theirs"], seconds["ours"]), "x")
        record(table, row, "multipack", [1e3 * s for s in seconds["ours"]], "ms")
        record(table, row, "lightbinpack", [1e3 * s for s in seconds["theirs"]], "ms")
        record(table, row, "bins, both", bins)


def speed() -> None:
    """Time a sequence of `pack` by method, 10^6 rows."""
    for name, (make, capacity) in WORKLOADS.items():
        lengths, row = make(10**6, capacity), f"{name}, {capacity}"
        packers: dict[str, Callable[[], Packing]] = {
            method: partial(pack, lengths, capacity, method=method) for method in METHODS
        }
        for packer in packers.values():
            assert_packs(packer(), lengths, capacity)
        seconds = in_turns({"sort": radix_sort(lengths), **packers}, 5)
        for method in METHODS:
            record(
                "pack 1,000,000 rows",
                row,
                f"{method}, radix sorts",
                over(seconds[method], seconds["sort"]),
                "x",
            )
        for method in METHODS:
            record(
                "pack 1,000,000 rows",
                row,
                method,
                [1e9 * s / len(lengths) for s in seconds[method]],
                "ns a row",
            )
        packing = pack(lengths, capacity)
        record("pack 1,000,000 rows", row, "auto: efficiency", 100 * packing.efficiency, "%")
        record("pack 1,000,000 rows", row, "bins above the bound", len(packing) - packing.lower_bound)
    lengths = lognormal(10**6)
    packing = pack(lengths, 4096, method="stream")
    correlation = np.corrcoef(np.arange(len(lengths)), lengths[packing.indices])[0, 1]
    delay = np.arange(len(lengths)) - packing.indices
    table, row = "order of stream", "log-normal, 4096"
    record(table, row, "efficiency", 100 * packing.efficiency, "%")
    record(table, row, "correlation of position and length", abs(correlation))
    record(table, row, "mean distance of a row from its place", np.abs(delay).mean(), "rows")
    record(table, row, "longest delay", delay.max(), "rows")


def real() -> None:
    """Whole real sets of lengths: bins against the bound, and the slowest of them at 10^6 rows."""
    table = "real sets of lengths"
    for capacity in (2048, 8192):
        bins = bound = sorted_bins = worse = proved = num_sets = 0
        slowest = ("", [0.0])
        for name, lengths in real_sets(capacity):
            auto, sorted_ = pack(lengths, capacity), pack(lengths, capacity, method="best_fit_decreasing")
            num_sets += 1
            bins, bound, sorted_bins = bins + len(auto), bound + auto.lower_bound, sorted_bins + len(sorted_)
            worse = max(worse, len(auto) - len(sorted_))
            if len(auto) == pairs_optimum(lengths, capacity):
                proved += len(auto) - auto.lower_bound
            if len(auto) > auto.lower_bound:
                gap = len(auto) - auto.lower_bound
                record("real sets above their bound", f"{name}, {capacity}", "bins above the bound", gap)
            tiled = np.resize(lengths, 10**6)
            seconds = in_turns({"sort": radix_sort(tiled), "pack": partial(pack, tiled, capacity)}, 2)
            sorts = over(seconds["pack"], seconds["sort"])
            slowest = max(slowest, (name, sorts), key=lambda found: min(found[1]))
        row = f"{num_sets} sets, {capacity}"
        record(table, row, "bins over the bound", bins / bound, "x")
        record(table, row, "less what a proof shows to be needed", (bins - proved) / bound, "x")
        record(table, row, "best-fit decreasing over the bound", sorted_bins / bound, "x")
        record(table, row, "most bins above best-fit decreasing", worse)
        record(table, row, "slowest set at 1,000,000 rows, radix sorts", slowest[1], "x")
        record(
            "the slowest real set at 1,000,000 rows",
            f"{slowest[0]}, {capacity}",
            "radix sorts",
            slowest[1],
            "x",
        )


def quality() -> None:
    """Instances of the literature with a proved optimum, items in random order."""
    load_ns = min(dependent_load_ns(1 << 20))
    for family in ("falkenauer_u", "falkenauer_t", "scholl1", "scholl2", "schwerin1", "schwerin2"):
        optimum = excess = ffd = 0
        slowest = 0.0
        instances = bin_packing_instances(family)
        for instance in instances:
            seconds = min(times(lambda: pack(instance["items"], instance["capacity"]), 3))  # noqa: B023  # called here
            slowest = max(slowest, 1e9 * seconds / len(instance["items"]) / load_ns)
            optimum += instance["upper"]
            excess += len(pack(instance["items"], instance["capacity"])) - instance["upper"]
            ffd += instance["ffd"] - instance["upper"]
        table = "instances of the literature"
        record(table, family, "bins above the optimum", excess)
        record(table, family, "first-fit decreasing", ffd)
        record(table, family, "optimum", optimum)
        record(table, family, "instances", len(instances))
        record(table, family, "slowest instance, dependent loads (1 MiB) an item", slowest, "x")


def random_order() -> None:
    """How random bins are: pairs of sequences that meet again in the next epoch, by method."""

    def pairs(plan: EpochPlan) -> set[int]:
        found = set()
        for rows in plan.bins(0, len(plan)):
            ordered = np.sort(rows)
            first, second = np.triu_indices(len(ordered), 1)
            found.update((ordered[first] * plan.num_rows + ordered[second]).tolist())
        return found

    table = "pairs of rows that share a bin in two epochs"
    for name, make, capacity in (("log-normal", lognormal, 4096), ("heavy tail", heavy_tail, 32768)):
        lengths = make(200_000)
        again: dict[str, float] = {}
        for method in ("next_fit", "auto", "best_fit_decreasing"):
            plans = [EpochPlan(lengths, capacity, epoch=epoch, method=method) for epoch in (0, 1)]
            first, second = (pairs(plan) for plan in plans)
            again[method] = len(first & second) / len(first)
            row = f"{name}, {capacity}, {method}"
            record(table, row, "over next-fit on a shuffle", again[method] / again["next_fit"], "x")
            record(table, row, "share", 100 * again[method], "%")
            record(table, row, "efficiency", 100 * plans[0].efficiency, "%")


def epochs() -> None:
    """How full epochs of 10^6 rows are, and forecasts."""
    worlds = {
        f"{name}, {capacity}": (make, capacity) for name, (make, capacity) in list(WORKLOADS.items())[:3]
    }
    for row, (make, capacity) in {**worlds, "heavy tail, 65536": (heavy_tail, 65536)}.items():
        whole = EpochPlan(make(10**6, capacity).astype(np.uint16), capacity)
        record("epochs of 1,000,000 rows", row, "efficiency", 100 * whole.efficiency, "%")
        record("epochs of 1,000,000 rows", row, "bins", len(whole))
        record("epochs of 1,000,000 rows", row, "more than the fewest possible", len(whole) - whole.min_bins)
    lengths = lognormal(10**6)
    histogram = np.bincount(lengths) * 10**5
    seconds = in_turns({"sort": radix_sort(lengths), "forecast": lambda: forecast(histogram, 4096)}, 5)
    table, row = "forecast of 10^11 rows from a histogram", "log-normal, 4096"
    record(table, row, "over a radix sort of 1,000,000", over(seconds["forecast"], seconds["sort"]), "x")
    record(table, row, "time", [1e3 * s for s in seconds["forecast"]], "ms")


def plan() -> None:
    """A plan of 10^7 rows: exact length, any batch, memory."""
    table, row = "a plan of 10,000,000 rows", "log-normal, 4096, rank 3 of 8"
    lengths = lognormal(10**7).astype(np.uint16)
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    started = time.perf_counter()
    batches = MultipackBatchSampler(lengths, 4096)
    next(iter(DistributedBatchSampler(batches, num_replicas=8, rank=3)))
    first = time.perf_counter() - started
    started = time.perf_counter()
    num_bins = len(batches)
    length_s = time.perf_counter() - started
    record(
        table,
        row,
        "memory beyond the lengths",
        1024 * (memory_kib("VmHWM") - before) / len(lengths),
        "bytes a row",
    )
    whole = EpochPlan(lengths, 4096)
    assert len(whole) == num_bins
    places = np.random.default_rng(0).integers(0, num_bins, 50)
    # Three times each, far apart, so that the slowest is that of a place and not of what else the machine
    # did.
    seek = np.min(
        [[times(partial(whole.bins, place, place + 1), 1)[0] for place in places] for _ in range(3)], axis=0
    )
    sort = min(times(radix_sort(lengths), 3))
    sort_window = min(times(radix_sort(lengths[: len(lengths) // whole.num_windows])))
    record(table, row, "exact length, radix sorts of all rows", length_s / sort, "x")
    record(table, row, "any batch by its place, radix sorts of a window", seek / sort_window, "x")
    record(table, row, "exact length", length_s, "s")
    record(table, row, "any batch by its place", 1e3 * seek, "ms")
    record(table, row, "first batch", 1e3 * first, "ms")


def balance() -> None:
    """Time of the slowest rank over the mean, summed over micro-steps (or steps)."""
    tokens, squares = EpochPlan(heavy_tail(10**6), 32768).costs(0, 40_000)
    costs = batch_cost(tokens, squares)
    table = "slowest rank over the mean"
    for ranks, accumulate in ((64, 16), (64, 4), (8, 16), (1024, 16)):
        size, row = ranks * accumulate, f"{ranks} ranks, accumulate {accumulate}"
        groups = [costs[i : i + size] for i in range(0, len(costs) - size + 1, size)]
        modes: tuple[BalanceMode, ...] = ("none", "micro_step", "step")
        for mode in modes:
            each = mode != "step"
            losses = [loss_of_balance(g, deal(g, ranks, mode), meet_every_micro_step=each) for g in groups]
            record(table, row, mode, float(np.mean(losses)), "x")
        seconds = times(partial(deal, groups[0], ranks, "step"))
        record(table, row, "step, a dealing", [1e3 * s for s in seconds], "ms")


DIGEST = """
import hashlib, json, sys
from benchmarks.length_sets import heavy_tail
from multipack import DistributedBatchSampler, MultipackBatchSampler
answer = {}
for ranks, accumulate in ((1, 192), (3, 64), (8, 24), (64, 3)):
    samplers = [DistributedBatchSampler(MultipackBatchSampler(heavy_tail(60_000), 32768), num_replicas=ranks, rank=r,
                                        accumulate=accumulate, balance="micro_step") for r in range(ranks)]
    steps = []
    batches = [list(s) for s in samplers]
    for i in range(0, len(batches[0]), accumulate):
        steps.append(sorted(row for b in batches for batch in b[i:i + accumulate] if not batch.repeated for row in batch))
    answer[ranks] = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16]
print(json.dumps(answer))
"""


def ranks() -> None:
    """The same rows in every optimizer step for any number of ranks, and in another process."""
    command = [sys.executable, "-c", DIGEST]
    answers = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(2)]
    digests = {value for answer in answers for value in answer.values()}
    record(
        "rows of every optimizer step", "1, 3, 8, 64 ranks, two processes", "different digests", len(digests)
    )


PARTS: dict[str, Callable[[], None]] = {
    "rival": rival,
    "speed": speed,
    "real": real,
    "quality": quality,
    "random_order": random_order,
    "epochs": epochs,
    "plan": plan,
    "balance": balance,
    "ranks": ranks,
}


def main(names: list[str]) -> None:
    for name in names or list(PARTS):
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
