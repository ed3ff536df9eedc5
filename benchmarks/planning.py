"""Tables on packing, planning and balance: how full, how fast, how random.

    taskset -c 1 python -m benchmarks.planning            # all tables, about three minutes
    taskset -c 1 python -m benchmarks.planning quality    # one of them

Times are the best of the runs, with the slowest beside them; ratios are between rivals that took turns in this run.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.length_sets import (
    SHARED,
    WORKLOADS,
    Lengths,
    bin_packing_instances,
    heavy_tail,
    lognormal,
    real_sets,
)
from benchmarks.packing_rivals import lightbinpack
from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler, forecast, pack
from multipack.order.balance import batch_cost, deal, loss_of_balance
from multipack.order.packing import Packing

LEFT_OUT = "Left out: needs the lengths and instances of the folder `shared` beside the checkout, which is not there."


def seconds(function: Callable[[], Any], runs: int = 5) -> tuple[float, float]:
    """Best and worst of the runs."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times), max(times)


def memory_kib(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field))


def pairs_optimum(lengths: Any, capacity: int) -> int | None:
    """Fewest bins where every length exceeds a third of a bin, so that a bin holds two at most; None elsewhere.

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
    print(
        "| rows | multipack ms | lightbinpack obfd ms | times faster, smallest to largest of the runs | bins, both |"
    )
    print("|---|---|---|---|---|")
    theirs = lightbinpack("obfd")
    for num_rows in (10**4, 10**5, 10**6):
        lengths = lognormal(num_rows)
        bins = len(pack(lengths, 4096, method="best_fit_decreasing"))
        assert bins == theirs(lengths, 4096)
        ours_s, theirs_s = [], []
        for _ in range(7):
            ours_s.append(seconds(partial(pack, lengths, 4096, method="best_fit_decreasing"), 1)[0])
            theirs_s.append(seconds(partial(theirs, lengths, 4096), 1)[0])
        ratios = sorted(b / a for a, b in zip(ours_s, theirs_s, strict=True))
        print(
            f"| {num_rows:,} | {1e3 * min(ours_s):.2f} | {1e3 * min(theirs_s):.1f} "
            f"| **{ratios[len(ratios) // 2]:.0f}** ({ratios[0]:.0f} to {ratios[-1]:.0f}) | {bins} |"
        )


def speed() -> None:
    """Time a sequence of `pack` by method, 10^6 rows."""
    print(
        "| lengths, capacity | stream ns | auto ns | best-fit decreasing ns | auto: efficiency | bins above the bound |"
    )
    print("|---|---|---|---|---|---|")
    for name, (make, capacity) in WORKLOADS.items():
        lengths = make(10**6, capacity)
        cells = []
        for method in ("stream", "auto", "best_fit_decreasing"):
            assert_packs(pack(lengths, capacity, method=method), lengths, capacity)
            best, worst = seconds(partial(pack, lengths, capacity, method=method), 3)
            cells.append(f"{1e9 * best / len(lengths):.1f} (to {1e9 * worst / len(lengths):.1f})")
        packing = pack(lengths, capacity)
        print(
            f"| {name}, {capacity} | {' | '.join(cells)} | {packing.efficiency:.4%} | {len(packing) - packing.lower_bound} |"
        )
    lengths = lognormal(10**6)
    packing = pack(lengths, 4096, method="stream")
    correlation = np.corrcoef(np.arange(len(lengths)), lengths[packing.indices])[0, 1]
    delay = np.arange(len(lengths)) - packing.indices
    print(
        f"\nOrder of `stream`, log-normal: efficiency {packing.efficiency:.4%}, correlation of position and length {correlation:+.5f}; a sequence comes "
        f"{np.abs(delay).mean():.0f} places from where it was on average, {delay.max()} at most."
    )


def real() -> None:
    """Real sets of lengths: bins against the bound, and time a row at 10^6 rows."""
    if not SHARED.is_dir():
        print(LEFT_OUT)
        return
    slowest = ("", 0.0)
    for capacity in (2048, 8192):
        bins = bound = sorted_bins = worse = num_sets = 0
        gaps = []
        for name, lengths in real_sets(capacity):
            auto, sorted_ = pack(lengths, capacity), pack(lengths, capacity, method="best_fit_decreasing")
            num_sets += 1
            bins, bound, sorted_bins = bins + len(auto), bound + auto.lower_bound, sorted_bins + len(sorted_)
            worse = max(worse, len(auto) - len(sorted_))
            if len(auto) > auto.lower_bound:
                proved = " (proved optimal)" if len(auto) == pairs_optimum(lengths, capacity) else ""
                gaps.append(f"{name} +{len(auto) - auto.lower_bound} of {auto.lower_bound}{proved}")
            tiled = np.resize(lengths, 10**6)
            nanoseconds = 1e3 * seconds(partial(pack, tiled, capacity), 2)[0]
            slowest = max(slowest, (f"{name}, {capacity}", nanoseconds), key=lambda item: item[1])
        print(
            f"- Capacity {capacity}, {num_sets} sets: {bins} bins, bound {bound}, ratio **{bins / bound:.5f}** (best-fit "
            f"decreasing {sorted_bins / bound:.5f}); at most {worse} bins more than best-fit decreasing on a set. Above the "
            f"bound: {'; '.join(gaps)}."
        )
    print(f"- Slowest set, repeated to 10^6 rows: {slowest[0]}, **{slowest[1]:.0f} ns** a row.")


def quality() -> None:
    """Instances of the literature with a proved optimum, items in random order."""
    if not SHARED.is_dir():
        print(LEFT_OUT)
        return
    print(
        "| family | instances | optimum | auto: bins too many | first-fit decreasing | slowest instance ms |"
    )
    print("|---|---|---|---|---|---|")
    for family in ("falkenauer_u", "falkenauer_t", "scholl1", "scholl2", "schwerin1", "schwerin2"):
        optimum = excess = ffd = 0
        slowest = 0.0
        instances = bin_packing_instances(family)
        for instance in instances:
            started = time.perf_counter()
            bins = len(pack(instance["items"], instance["capacity"]))
            slowest = max(slowest, time.perf_counter() - started)
            optimum += instance["upper"]
            excess += bins - instance["upper"]
            ffd += instance["ffd"] - instance["upper"]
        print(f"| {family} | {len(instances)} | {optimum} | **{excess}** | {ffd} | {1e3 * slowest:.2f} |")


def random_order() -> None:
    """How random bins are: pairs of sequences that meet again in the next epoch, by method."""

    def pairs(plan: EpochPlan) -> set[int]:
        found = set()
        for rows in plan.bins(0, len(plan)):
            ordered = np.sort(rows)
            first, second = np.triu_indices(len(ordered), 1)
            found.update((ordered[first] * plan.num_rows + ordered[second]).tolist())
        return found

    print("| lengths, capacity | method | efficiency | pairs that meet again | times next-fit |")
    print("|---|---|---|---|---|")
    for name, make, capacity in (("log-normal", lognormal, 4096), ("heavy tail", heavy_tail, 32768)):
        lengths = make(200_000)
        again: dict[str, float] = {}
        for method in ("next_fit", "auto", "best_fit_decreasing"):
            plans = [EpochPlan(lengths, capacity, epoch=epoch, method=method) for epoch in (0, 1)]
            first, second = (pairs(plan) for plan in plans)
            again[method] = len(first & second) / len(first)
            print(
                f"| {name}, {capacity} | {method} | {plans[0].efficiency:.3%} | {again[method]:.5%} "
                f"| {again[method] / again['next_fit']:.2f} |"
            )


def plan() -> None:
    """A plan of 10^7 rows: exact length, any batch, memory; forecasts; efficiency of epochs of 10^6 rows."""
    for name, (make, capacity) in list(WORKLOADS.items())[:3]:
        whole = EpochPlan(make(10**6, capacity).astype(np.uint16), capacity)
        print(
            f"- Epoch of 10^6 rows, {name}, capacity {capacity}: {len(whole)} bins (bound {whole.min_bins}), efficiency "
            f"{whole.efficiency:.4%}, {whole.num_windows} windows."
        )
    whole = EpochPlan(heavy_tail(10**6), 65536)
    print(
        f"- Epoch of 10^6 rows, heavy tail, capacity 65536: {len(whole)} bins, efficiency {whole.efficiency:.4%}."
    )
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
    grown = memory_kib("VmHWM") - before
    plan = EpochPlan(lengths, 4096)
    assert len(plan) == num_bins
    places = np.random.default_rng(0).integers(0, num_bins, 50)
    # Three times each, far apart, so that the slowest is that of a place and not of what else the machine did.
    seek = np.min(
        [[seconds(partial(plan.bins, place, place + 1), 1)[0] for place in places] for _ in range(3)], axis=0
    )
    print(
        f"- 10^7 rows, log-normal, {len(os.sched_getaffinity(0))} cores: first batch of rank 3 of 8 after {1e3 * first:.0f} ms, exact "
        f"length ({num_bins} bins) after {length_s:.2f} s more, a batch at a random place {1e3 * np.median(seek):.1f} ms (slowest "
        f"{1e3 * seek.max():.1f}); peak memory grew by {1024 * grown / len(lengths):.2f} bytes a row."
    )
    histogram = np.bincount(lognormal(10**6)) * 10**5
    best, worst = seconds(lambda: forecast(histogram, 4096))
    print(f"- Forecast of 10^11 rows from a histogram: {1e3 * best:.1f} ms (to {1e3 * worst:.1f}).")


def balance() -> None:
    """Time of the slowest rank over the mean, summed over micro-steps (or steps)."""
    print("| ranks, accumulate | in turn | sorted | lpt | lpt, ms a step |")
    print("|---|---|---|---|---|")
    tokens, squares = EpochPlan(heavy_tail(10**6), 32768).costs(0, 40_000)
    costs = batch_cost(tokens, squares)
    for ranks, accumulate in ((64, 16), (64, 4), (8, 16), (1024, 16)):
        size = ranks * accumulate
        groups = [costs[i : i + size] for i in range(0, len(costs) - size + 1, size)]
        losses = {
            mode: np.mean(
                [
                    loss_of_balance(g, deal(g, ranks, mode), meet_every_micro_step=mode != "step")
                    for g in groups
                ]
            )
            for mode in ("none", "micro_step", "step")
        }
        best, _ = seconds(partial(deal, groups[0], ranks, "step"))
        print(
            f"| {ranks}, {accumulate} | {losses['none']:.4f} | {losses['micro_step']:.4f} | {losses['step']:.5f} | {1e3 * best:.2f} |"
        )


DIGEST = """
import hashlib, json, sys
from benchmarks.length_sets import heavy_tail
from multipack import DistributedBatchSampler, MultipackBatchSampler
answer = {}
for ranks, accumulate in ((1, 192), (3, 64), (8, 24), (64, 3)):
    samplers = [DistributedBatchSampler(MultipackBatchSampler(heavy_tail(60_000), 32768), num_replicas=ranks, rank=r,
                                        accumulate=accumulate, balance="micro_step") for r in range(ranks)]
    steps = []
    batches = [list(s.read()) for s in samplers]
    for i in range(0, len(batches[0]), accumulate):
        steps.append(sorted(row for b in batches for batch in b[i:i + accumulate] if not batch.repeated for row in batch))
    answer[ranks] = hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16]
print(json.dumps(answer))
"""


def ranks() -> None:
    """The same steps for any number of ranks, and in another process."""
    answers = [
        json.loads(
            subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(2)
    ]
    digests = {value for answer in answers for value in answer.values()}
    print(
        f"Sets of rows of every optimizer step, 1, 3, 8 and 64 ranks in two processes: digests {sorted(digests)}."
    )
    assert len(digests) == 1


TABLES: dict[str, Callable[[], None]] = {
    "rival": rival,
    "speed": speed,
    "real": real,
    "quality": quality,
    "random_order": random_order,
    "plan": plan,
    "balance": balance,
    "ranks": ranks,
}


def main(names: list[str]) -> None:
    for name in names or list(TABLES):
        print(f"\n### {(TABLES[name].__doc__ or '').splitlines()[0]}\n")
        TABLES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
