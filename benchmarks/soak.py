"""Run the loader for long and watch what must not grow: memory, threads, files.

    python -m benchmarks.soak [--seconds 120] [--batches 1000000] [--epochs 10000]

Three parts, each of them ended by its count or by `--seconds`: batches of one pass after another over a large
data set, epochs of a data set of a few batches (each starts its threads anew), and loaders that are stopped,
saved and built again from their state. Ends with an error when something grows: resident memory by more than
8 MB between the first fifth and the end, by the slope of a line through the samples; or threads or files by
one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
import psutil

from benchmarks.record import record
from multipack import packed_dataloader

MOST_GROWTH_BYTES = 8e6
SAMPLES = 200
CAPACITY = 256


@dataclass
class Watch:
    """Resident memory, threads and files of this process at equal distances of work."""

    process: psutil.Process = field(default_factory=psutil.Process)
    work: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def sample(self, work: int) -> None:
        """Note where things stand after `work` units."""
        self.work.append(work)
        self.resident.append(self.process.memory_info().rss)
        self.threads.append(self.process.num_threads())
        self.files.append(self.process.num_fds())

    @property
    def growth_bytes(self) -> float:
        """What a line through the samples rises by from the first fifth of the work to its end."""
        warm = len(self.work) // 5
        work, resident = np.array(self.work[warm:], float), np.array(self.resident[warm:], float)
        slope = np.polyfit(work, resident, 1)[0]
        return float(slope * (work[-1] - work[0]))


def rows_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 1 to 60 tokens."""
    lengths = np.random.default_rng(0).integers(1, 61, count)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return np.zeros(offsets[-1], np.int32), offsets


def batches() -> Generator[None, None, None]:
    """One batch after the other of a data set of a million rows, 120,000 batches an epoch."""
    loader = packed_dataloader(rows_of(1_000_000), CAPACITY, num_workers=1, rank=0, num_replicas=1)
    while True:
        for _ in loader:
            yield


def epochs() -> Generator[None, None, None]:
    """One epoch after the other of a data set of 24 rows, with two threads each."""
    loader = packed_dataloader(rows_of(24), CAPACITY, num_workers=2, rank=0, num_replicas=1)
    while True:
        for _ in loader:
            pass
        yield


def restarts() -> Generator[None, None, None]:
    """One loader after the other, each begun from the state of the last and stopped after three batches, with
    some in its queue."""
    rows = rows_of(2000)
    state = None
    while True:
        loader = packed_dataloader(rows, CAPACITY, num_workers=1, prefetch_batches=4, rank=0, num_replicas=1)
        if state is not None:
            loader.load_state_dict(state)
        for _ in itertools.islice(loader, 3):
            pass
        state = loader.state_dict()
        yield


def watch(work: Generator[None, None, None], count: int, seconds: float) -> tuple[Watch, float]:
    """Do `count` units of work, or as many as the time allows; returns what was seen and the seconds it
    took."""
    next(work)
    gc.collect()
    seen = Watch()
    started = time.monotonic()
    due = started
    done = 0
    while done < count and time.monotonic() - started < seconds:
        if time.monotonic() >= due:
            seen.sample(done)
            due += seconds / SAMPLES
        for _ in itertools.islice(work, min(20, count - done)):
            done += 1
    seen.sample(done)
    work.close()
    return seen, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="most seconds of each part")
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--restarts", type=int, default=10_000)
    arguments = parser.parse_args()
    parts = [
        ("batches", batches(), arguments.batches),
        ("epochs", epochs(), arguments.epochs),
        ("restarts", restarts(), arguments.restarts),
    ]
    grew = False
    for name, work, count in parts:
        seen, seconds = watch(work, count, arguments.seconds)
        threads, files = seen.threads[1:] or seen.threads, seen.files
        record("soak", name, "growth of resident memory", seen.growth_bytes / 1e6, "MB")
        record("soak", name, "resident memory", [resident / 1e6 for resident in seen.resident], "MB")
        record("soak", name, "threads", threads)
        record("soak", name, "files", files)
        record("soak", name, "count", seen.work[-1])
        record("soak", name, "time", seconds, "s")
        grew |= (
            seen.growth_bytes > MOST_GROWTH_BYTES or files[-1] > files[0] or threads[-1] > max(threads[:3])
        )
    if grew:
        print("Something grew.", file=sys.stderr)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
