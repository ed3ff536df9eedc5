"""Packers that users have today; each takes lengths and a capacity and says how many bins it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

Count = Callable[[npt.NDArray[np.int32], int], int]


def lightbinpack(method: str) -> Count:
    """A method of lightbinpack (C++). It takes a list; the conversion is part of its price, as in real use."""
    import lightbinpack as library

    pack = getattr(library, method)
    return lambda lengths, capacity: len(pack(lengths.tolist(), capacity))


LIGHTBINPACK_METHODS = ("nf", "ffd", "bfd", "obfd", "obfdp")


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
