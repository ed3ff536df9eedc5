"""Batches from disk to tensors: how many tokens a second of CPU each loader makes, and how soon the first
batch comes.

    taskset -c 1 python -m pytest benchmarks/test_loading_speed.py -s

CPU time is that of the process and its workers together, so that loaders with more processes have no
advantage from them; the first batch is left out.
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
from benchmarks.record import record
from benchmarks.rivals import trl_collator
from benchmarks.timing import over

ROUNDS = 3
PLAIN = "torch DataLoader + trl, 0 workers"
pytestmark = pytest.mark.filterwarnings("ignore")  # the rivals' own


class Speed(NamedTuple):
    """Tokens a second of one way to load, one value a round."""

    by_cpu: list[float]
    by_wall: list[float]


def measure(make: Callable[[Workload], Iterator[Any]], data: Workload, batches: int) -> Speed:
    speed = Speed([], [])
    for _ in range(ROUNDS):
        gc.collect()
        iterator = make(data)
        next(iterator)
        cpu, wall, tokens = cpu_seconds(), time.perf_counter(), 0
        for _ in range(batches):
            tokens += next(iterator)["input_ids"].numel()
        speed.by_cpu.append(tokens / (cpu_seconds() - cpu))
        speed.by_wall.append(tokens / (time.perf_counter() - wall))
        del iterator
    return speed


def cpu_seconds() -> float:
    """CPU time so far of this process and its living children."""
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(float(times.user + times.system) for times in children)


FIRST_BATCH = """
import time, numpy as np, pyarrow as pa
import multipack
from benchmarks.probes import radix_sort
from benchmarks.timing import times
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
ended = time.perf_counter()
print(opened - started, built - opened, ended - built, min(times(radix_sort(lengths), 3)))
"""


def first_batch() -> None:
    """From a table of a million rows to its first batch, in fresh processes, after imports."""
    command = [sys.executable, "-c", FIRST_BATCH]
    runs = [
        [float(word) for word in subprocess.run(command, capture_output=True, check=True).stdout.split()]
        for _ in range(ROUNDS)
    ]
    opened, built, first, sort = (list(values) for values in zip(*runs, strict=True))
    whole = [a + b for a, b in zip(built, first, strict=True)]
    table, row = "first batch of 1,000,000 rows", "log-normal, 65536"
    record(table, row, "samplers, loader and batch, radix sorts", over(whole, sort), "x")
    for name, seconds in (("TokenDataset", opened), ("samplers and loader", built), ("first batch", first)):
        record(table, row, name, [1e3 * s for s in seconds], "ms")


def test_tokens_a_cpu_second() -> None:
    torch.set_num_threads(1)
    table = "tokens a CPU second"
    with workload(60_000) as data:
        expected = trl_collator()(data.rows.__getitems__(data.bins[0]))
        for make in (RIVALS | OURS).values():
            assert_same_batch(next(make(data)), expected)
        speeds = {name: measure(make, data, 12) for name, make in RIVALS.items()}
        speeds |= {name: measure(make, data, 300) for name, make in OURS.items()}
    best = max(RIVALS, key=lambda name: statistics.median(speeds[name].by_cpu))
    for name, speed in speeds.items():
        record(table, name, "over the best rival", over(speed.by_cpu, speeds[best].by_cpu), "x")
        record(table, name, "over torch + trl", over(speed.by_cpu, speeds[PLAIN].by_cpu), "x")
        record(table, name, "of CPU", [rate / 1e6 for rate in speed.by_cpu], "Mtok/s")
        record(table, name, "of wall time", [rate / 1e6 for rate in speed.by_wall], "Mtok/s")


def test_first_batch() -> None:
    first_batch()
