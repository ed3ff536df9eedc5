"""What this machine can do, measured in the same run as the claims that are ratios to it.

    taskset -c 1 python -m benchmarks.probes

A probe does the least that a claim's work must do: a radix sort of as many lengths, loads that wait for each
other, a copy of as many bytes, a sleep as long as a step, tiny operations beside a thread that only waits.
The claims' benchmarks call the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.record import record
from benchmarks.timing import times

BATCH_BYTES = 1_835_676
"""Of the tensors of a batch of 65,536 tokens."""
STEP_S = 0.020
TINY_OPERATIONS = 3000
CACHE_LINE = 64
_TINY = torch.zeros(8)


def radix_sort(lengths: npt.NDArray[Any]) -> Callable[[], object]:
    """A stable argsort of the lengths as uint16, which numpy does by radix. Longer ones are halved until they
    fit."""
    small = (lengths >> max(0, int(lengths.max()).bit_length() - 16)).astype(np.uint16)
    return partial(np.argsort, small, kind="stable")


@numba.njit(cache=True)  # type: ignore[untyped-decorator]  # numba has no types
def _follow(next_of: Any, steps: int) -> int:
    place = 0
    for _ in range(steps):
        place = next_of[place]
    return place


def dependent_load_ns(num_bytes: int, steps: int = 200_000) -> list[float]:
    """Nanoseconds of a load whose address is the value of the load before: one random cycle over all cache
    lines of a buffer."""
    per_line = CACHE_LINE // 8
    order = np.random.default_rng(0).permutation(num_bytes // CACHE_LINE) * per_line
    next_of = np.zeros(num_bytes // 8, np.int64)
    next_of[order] = np.roll(order, -1)
    _follow(next_of, steps)
    return [1e9 * seconds / steps for seconds in times(lambda: _follow(next_of, steps))]


def copy(num_bytes: int) -> Callable[[], None]:
    """numpy.copyto of so many bytes, from a random place of a source larger than most caches."""
    source = np.random.default_rng(0).integers(0, 256, 160_000_000, dtype=np.uint8)
    places = np.random.default_rng(1).integers(0, len(source) - num_bytes, 1000).tolist()
    target = np.zeros(num_bytes, np.uint8)

    def run() -> None:
        place = places.pop()
        places.insert(0, place)
        np.copyto(target, source[place : place + num_bytes])

    return run


def sleep() -> None:
    """A step of an accelerator, during which the interpreter is free."""
    time.sleep(STEP_S)


def tiny_operations() -> None:
    """A step of a model of many small kernels, which starts them under the interpreter's lock."""
    for _ in range(TINY_OPERATIONS):
        _TINY.add_(1.0)


def main() -> None:
    table = "probes"
    lengths = np.random.default_rng(0).integers(1, 4097, 10**6)
    sort = [1e3 * seconds for seconds in times(radix_sort(lengths))]
    record(table, "radix sort of 1,000,000 lengths", "time", sort, "ns an item")
    for mebibytes in (1, 16, 256):
        record(table, f"dependent load, {mebibytes} MiB", "time", dependent_load_ns(mebibytes << 20), "ns")
    copied = [BATCH_BYTES / seconds / 1e9 for seconds in times(copy(BATCH_BYTES), 200)]
    record(table, f"copy of {BATCH_BYTES:,} bytes", "rate", copied, "GB/s")
    record(table, "sleep of 20 ms", "time", [1e3 * seconds for seconds in times(sleep, 50)], "ms")
    tiny = [1e6 * seconds / TINY_OPERATIONS for seconds in times(tiny_operations, 50)]
    record(table, "tiny torch operation", "time", tiny, "us")


if __name__ == "__main__":
    main()
