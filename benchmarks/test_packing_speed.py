"""Planning bins: ours and the packers that users have today.

    taskset -c 1 python -m pytest benchmarks/test_packing_speed.py

Lengths are log-normal (mean 350, sigma 1, clipped to 8..4096), capacity 4096. Every answer is checked before it is timed: as many
bins as best-fit decreasing needs, or, for methods that keep the order, at most so many more.
"""

from __future__ import annotations

import pytest

from benchmarks.length_sets import lognormal
from benchmarks.packing_rivals import (
    LIGHTBINPACK_METHODS,
    binpacking,
    lightbinpack,
    numba_first_fit_decreasing,
    trl,
)
from multipack import pack

CAPACITY = 4096


def ours(method):
    return lambda lengths, capacity: len(pack(lengths, capacity, method=method))


PACKERS = {
    f"multipack {method}": ours(method) for method in ("auto", "stream", "best_fit_decreasing", "next_fit")
}
PACKERS |= {f"lightbinpack {method}": lightbinpack(method) for method in LIGHTBINPACK_METHODS}
PACKERS |= {"numba first-fit decreasing": numba_first_fit_decreasing}
SLOW_PACKERS = {"trl bfd": trl(), "binpacking": binpacking}


def check(name: str, bins: int, lengths) -> None:
    best = len(pack(lengths, CAPACITY, method="best_fit_decreasing"))
    most = 1.2 * best if "next_fit" in name or name.endswith(" nf") else best + 2
    if name == "binpacking":  # worst fit
        most = 1.05 * best
    assert best - 2 <= bins <= most, (name, bins, best)


@pytest.mark.benchmark(group="pack 10,000 sequences")
@pytest.mark.parametrize("name", [*PACKERS, *SLOW_PACKERS])
def test_pack_ten_thousand(benchmark, name):
    packer, lengths = {**PACKERS, **SLOW_PACKERS}[name], lognormal(10_000)
    check(name, packer(lengths, CAPACITY), lengths)
    benchmark(packer, lengths, CAPACITY)


@pytest.mark.benchmark(group="pack 1,000,000 sequences")
@pytest.mark.parametrize("name", PACKERS)
def test_pack_a_million(benchmark, name):
    packer, lengths = PACKERS[name], lognormal(1_000_000)
    check(name, packer(lengths, CAPACITY), lengths)
    benchmark.pedantic(packer, (lengths, CAPACITY), rounds=5, warmup_rounds=1)
