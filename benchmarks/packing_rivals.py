"""Packers that users have today; each takes lengths and a capacity and says how many bins it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from multipack import pack

Count = Callable[[npt.NDArray[np.int32], int], int]


def assert_bins(name: str, bins: int, lengths: npt.NDArray[np.int32], capacity: int) -> None:
    """At least the bound, and as many bins as best-fit decreasing needs, or at most so many more as the
    method may."""
    best = pack(lengths, capacity, method="best_fit_decreasing")
    most = float(len(best) + 2)
    if "next_fit" in name or name.endswith(" nf"):
        most = 1.2 * len(best)
    elif name == "binpacking":  # worst fit
        most = 1.05 * len(best)
    assert best.lower_bound <= bins <= most, (name, bins, len(best))


def ours(method: Any) -> Count:
    return lambda lengths, capacity: len(pack(lengths, capacity, method=method))


def lightbinpack(method: str) -> Count:
    """A method of lightbinpack (C++). It takes a list; the conversion is part of its price, as in real
    use."""
    import lightbinpack as library

    bins_of = getattr(library, method)
    return lambda lengths, capacity: len(bins_of(lengths.tolist(), capacity))


LIGHTBINPACK_METHODS = ("nf", "ffd", "bfd", "obfd", "obfdp", "ogbfd", "ogbfdp")
"""All that take one capacity; the grouped ones with groups of one bin."""


def trl(strategy: str = "bfd") -> Count:
    """trl's `pack_dataset`, which also writes the packed rows: here of one-byte tokens."""
    import datasets
    from trl import pack_dataset

    def count(lengths: npt.NDArray[np.int32], capacity: int) -> int:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
        dataset = datasets.Dataset(pa.table({"input_ids": rows}))
        packed = pack_dataset(dataset, capacity, strategy, map_kwargs={"batch_size": len(lengths)})
        return len(packed)

    return count


def binpacking(lengths: npt.NDArray[np.int32], capacity: int) -> int:
    """The package binpacking: worst fit decreasing in plain Python."""
    import binpacking as library

    return len(library.to_constant_volume(dict(enumerate(lengths.tolist())), capacity))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _first_fit_decreasing(sorted_lengths: Any, capacity: int) -> int:
    """First fit with a tree of the largest rest (Johnson 1974): O(n log n)."""
    size = 1
    while size < len(sorted_lengths):
        size *= 2
    rest = np.full(2 * size, capacity, np.int32)
    used = 0
    for length in sorted_lengths:
        node = 1
        while node < size:
            node *= 2
            if rest[node] < length:
                node += 1
        rest[node] -= length
        used = max(used, node - size + 1)
        node //= 2
        while node:
            rest[node] = max(rest[2 * node], rest[2 * node + 1])
            node //= 2
    return used


def numba_first_fit_decreasing(lengths: npt.NDArray[np.int32], capacity: int) -> int:
    """First-fit decreasing from its definition, compiled by numba."""
    return int(_first_fit_decreasing(np.sort(lengths)[::-1], capacity))
