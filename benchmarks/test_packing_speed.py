"""Planning bins: ours and the packers that users have today.

    taskset -c 1 python -m pytest benchmarks/test_packing_speed.py

Lengths are log-normal (mean 350, sigma 1, clipped to 8..4096), capacity 4096. Every answer is checked before
it is timed: as many bins as best-fit decreasing needs, or, for methods that keep the order, at most so many
more. The bound is the larger of ceil(sum / capacity) and that of Martello and Toth (L2).
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.length_sets import Lengths, lognormal
from benchmarks.packing_rivals import (
    LIGHTBINPACK_METHODS,
    Count,
    assert_bins,
    binpacking,
    lightbinpack,
    numba_first_fit_decreasing,
    ours,
    trl,
)
from multipack import pack

CAPACITY = 4096
PACKERS = {
    f"multipack {method}": ours(method) for method in ("auto", "stream", "best_fit_decreasing", "next_fit")
}
PACKERS |= {f"lightbinpack {method}": lightbinpack(method) for method in LIGHTBINPACK_METHODS}
PACKERS |= {"numba first-fit decreasing": numba_first_fit_decreasing}
SLOW_PACKERS = {"trl bfd": trl(), "binpacking": binpacking}


def checked(name: str, num_rows: int, benchmark: Any) -> tuple[Count, tuple[Lengths, int]]:
    """A packer and what it is to pack, once its number of bins has been checked; notes how many are above the
    bound."""
    packer, lengths = {**PACKERS, **SLOW_PACKERS}[name], lognormal(num_rows)
    bins = packer(lengths, CAPACITY)
    assert_bins(name, bins, lengths, CAPACITY)
    bound = pack(lengths, CAPACITY).lower_bound
    benchmark.extra_info["bins above the bound"] = bins - bound
    return packer, (lengths, CAPACITY)


@pytest.mark.benchmark(group="pack 10,000 sequences")
@pytest.mark.parametrize("name", [*PACKERS, *SLOW_PACKERS])
def test_pack_ten_thousand(benchmark: Any, name: str) -> None:
    packer, task = checked(name, 10_000, benchmark)
    benchmark(packer, *task)


@pytest.mark.benchmark(group="pack 1,000,000 sequences")
@pytest.mark.parametrize("name", PACKERS)
def test_pack_a_million(benchmark: Any, name: str) -> None:
    packer, task = checked(name, 1_000_000, benchmark)
    benchmark.pedantic(packer, task, rounds=5, warmup_rounds=1)
