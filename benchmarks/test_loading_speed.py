"""Batches from disk to tensors: how many tokens a second of CPU each loader makes, and how soon the first batch comes.

    python -m pytest benchmarks/test_loading_speed.py -s          # checks the claims
    python -m benchmarks.test_loading_speed                       # prints the tables

CPU time is that of the process and its workers together, so that loaders with more processes have no advantage from them; the
first batch is left out. Pin to one core (`taskset -c 1`) on a shared machine.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from benchmarks.loading_rivals import OURS, RIVALS, Workload, assert_same_batch, workload
from benchmarks.rivals import trl_collator

ROUNDS = 3
pytestmark = pytest.mark.filterwarnings("ignore")  # the rivals' own


class Speed(NamedTuple):
    """One way to load: medians over the rounds."""

    tokens_per_cpu_s: float
    tokens_per_s: float
    spread: float
    """(Largest - smallest) / median of tokens_per_cpu_s over the rounds."""


def measure(make: Callable[[Workload], Iterator[Any]], data: Workload, batches: int) -> Speed:
    by_cpu, by_wall = [], []
    for _ in range(ROUNDS):
        gc.collect()
        iterator = make(data)
        next(iterator)
        cpu, wall, tokens = cpu_seconds(), time.perf_counter(), 0
        for _ in range(batches):
            tokens += next(iterator)["input_ids"].numel()
        by_cpu.append(tokens / (cpu_seconds() - cpu))
        by_wall.append(tokens / (time.perf_counter() - wall))
        del iterator
    middle = statistics.median(by_cpu)
    return Speed(middle, statistics.median(by_wall), (max(by_cpu) - min(by_cpu)) / middle)


def cpu_seconds() -> float:
    """CPU time so far of this process and its living children."""
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(float(times.user + times.system) for times in children)


def throughput() -> dict[str, Speed]:
    torch.set_num_threads(1)
    with workload(60_000) as data:
        expected = trl_collator()(data.rows.__getitems__(data.bins[0]))
        for make in (RIVALS | OURS).values():
            assert_same_batch(next(make(data)), expected)
        speeds = {name: measure(make, data, 12) for name, make in RIVALS.items()}
        return speeds | {name: measure(make, data, 300) for name, make in OURS.items()}


FIRST_BATCH = """
import time, numpy as np, pyarrow as pa
import multipack
lengths = np.clip(np.random.default_rng(0).lognormal(5.4, 1.0, 10**6), 8, 4096).astype(np.int64)
offsets = np.concatenate(([0], np.cumsum(lengths)))
table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int32))})
started = time.perf_counter()
dataset = multipack.TokenDataset(table)
opened = time.perf_counter()
sampler = multipack.DistributedBatchSampler(multipack.MultipackBatchSampler(dataset.lengths, 65536), num_replicas=1, rank=0)
loader = multipack.DataLoader(dataset, batch_sampler=sampler, collate_fn=multipack.PackedCollator())
built = time.perf_counter()
next(iter(loader))
print(opened - started, built - opened, time.perf_counter() - built)
"""


class FirstBatch(NamedTuple):
    """Seconds from a table of a million rows to its first batch, in a fresh process, after imports."""

    open_s: float
    build_s: float
    first_s: float


def first_batch() -> FirstBatch:
    runs = []
    for _ in range(ROUNDS):
        result = subprocess.run(
            [sys.executable, "-c", FIRST_BATCH], capture_output=True, text=True, check=True
        )
        runs.append([float(value) for value in result.stdout.split()])
    return FirstBatch(*(statistics.median(values) for values in zip(*runs, strict=True)))


@pytest.fixture(scope="module")
def speeds() -> dict[str, Speed]:
    result = throughput()
    print("\n" + throughput_table(result))
    return result


def test_ten_times_the_tokens_per_cpu_second_of_the_best_rival(speeds: dict[str, Speed]) -> None:
    best = max(speeds[name].tokens_per_cpu_s for name in RIVALS)
    assert speeds["multipack DataLoader, 1 thread"].tokens_per_cpu_s >= 10 * best


def test_torchs_loader_over_our_parts_is_twenty_times_torch_with_trl(speeds: dict[str, Speed]) -> None:
    rival = speeds["torch DataLoader + trl, 0 workers"].tokens_per_cpu_s
    assert speeds["torch DataLoader over our parts"].tokens_per_cpu_s >= 20 * rival


def test_first_batch_of_a_million_rows_within_0_3_seconds() -> None:
    times = first_batch()
    print("\n" + first_batch_line(times))
    assert times.build_s + times.first_s <= 0.3


def throughput_table(speeds: dict[str, Speed]) -> str:
    base = speeds["torch DataLoader + trl, 0 workers"].tokens_per_cpu_s
    lines = [
        "| loader | Mtok a CPU second | x torch + trl | Mtok a second | spread |",
        "|---|---|---|---|---|",
    ]
    for name, speed in speeds.items():
        lines.append(
            f"| {name} | {speed.tokens_per_cpu_s / 1e6:.1f} | {speed.tokens_per_cpu_s / base:.1f} | "
            f"{speed.tokens_per_s / 1e6:.1f} | {speed.spread:.0%} |"
        )
    return "\n".join(lines)


def first_batch_line(times: FirstBatch) -> str:
    return (
        f"1,000,000 rows: TokenDataset {times.open_s * 1e3:.0f} ms, samplers and loader {times.build_s * 1e3:.0f} ms, "
        f"first batch {times.first_s * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    print(throughput_table(throughput()))
    print(first_batch_line(first_batch()))
