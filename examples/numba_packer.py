"""A packer of your own, in numba: it runs at native speed, and its answer is checked.

    python examples/numba_packer.py

A packer is any callable `(lengths, capacity) -> (offsets, indices)`: bin b holds rows
`indices[offsets[b]:offsets[b + 1]]`. This one is first-fit decreasing, to compare with the packers that are
there.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from multipack import pack, packed_dataloader


@numba.njit
def assign(lengths: NDArray[np.int32], order: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Bin of each row: the first one that has room, longest rows first."""
    room = np.full(len(lengths), capacity)
    bins = np.empty(len(lengths), np.int64)
    for row in order:
        b = 0
        while room[b] < lengths[row]:
            b += 1
        bins[row] = b
        room[b] -= lengths[row]
    return bins


def first_fit_decreasing(
    lengths: NDArray[np.int32], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows sorted by bin, and where each bin begins."""
    bins = assign(lengths, np.argsort(-lengths, kind="stable"), capacity)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(bins))))
    return offsets, np.argsort(bins, kind="stable")


lengths = np.random.default_rng(0).lognormal(5, 0.9, 5000).astype(int).clip(1, 2048)
for method in (first_fit_decreasing, "auto", "next_fit"):
    packing = pack(lengths, 2048, method=method)
    name = method if isinstance(method, str) else method.__name__
    print(f"{name:>20}: {len(packing)} bins, {packing.efficiency:.2%} full, {packing.lower_bound} at least")

rows = [np.arange(n) for n in lengths[:500]]
loader = packed_dataloader(
    rows, capacity=2048, method=first_fit_decreasing
)  # called once a window of the plan
print(f"{sum(batch['num_sequences'] for batch in loader)} rows came through the loader")
