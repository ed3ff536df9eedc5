"""An epoch without the global batches that a run leaves out.

The one rule: what is left out is named by global batches, which know nothing of ranks, so it stays out on any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from multipack.order.batch import BatchIndices, LeftOut
from multipack.order.orders import Order

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Global batches first..stop-1 of an epoch: ascending, with batches between them."""


Skipped: TypeAlias = Mapping[int, Ranges]
"""What is left out of each epoch."""


def both(one: Skipped, other: Skipped) -> Skipped:
    """What either leaves out."""
    return {epoch: joined([*one.get(epoch, ()), *other.get(epoch, ())]) for epoch in sorted({*one, *other})}


def as_state(skipped: Skipped) -> list[list[int]]:
    """[epoch, first, stop] of each range, for a saved state."""
    return [[epoch, *ends] for epoch, ranges in skipped.items() for ends in ranges]


def from_state(ranges: Iterable[Iterable[int]]) -> Skipped:
    """What `as_state` wrote."""
    read: Skipped = {}
    for epoch, first, stop in ranges:
        read = both(read, {int(epoch): ((int(first), int(stop)),)})
    return read


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same batches, as ranges that are ascending and apart."""
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif first < stop:
            merged.append((first, stop))
    return tuple(merged)


class SkippingOrder(Order):
    """The batches of an order without some, numbered without a gap.

    Args:
        inner: the order of an epoch.
        skipped: what is left out of each epoch.
    """

    def __init__(self, inner: Order, skipped: Skipped) -> None:
        self._inner = inner
        self._skipped = skipped
        self._ranges = skipped.get(inner.epoch, ())
        self.epoch = inner.epoch
        self.num_rows = inner.num_rows
        self.is_resumable = inner.is_resumable

    def number_of(self, i: int) -> int:
        """The number that batch `i` has in the whole epoch."""
        for first, stop in self._ranges:
            if i < first:
                break
            i += stop - first
        return i

    def kept_before(self, number: int) -> int:
        """How many batches come before `number` of the whole epoch."""
        return number - sum(min(stop, number) - first for first, stop in self._ranges if first < number)

    @property
    def capacity(self) -> int | None:
        return self._inner.capacity

    @property
    def left_out(self) -> LeftOut:
        return self._inner.left_out

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    def at(self, epoch: int) -> SkippingOrder:
        return SkippingOrder(self._inner.at(epoch), self._skipped)

    def __len__(self) -> int:
        return self.kept_before(len(self._inner))

    def has(self, i: int) -> bool:
        return self._inner.has(self.number_of(i))

    def batch(self, i: int) -> BatchIndices:
        return self._inner.batch(self.number_of(i))

    def costs(self, start: int, stop: int, hidden_size: int) -> NDArray[np.float64]:
        numbers = np.array([self.number_of(i) for i in range(start, stop)])
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        return np.concatenate([self._inner.costs(int(run[0]), int(run[-1]) + 1, hidden_size) for run in runs])

    def early(self, i: int) -> BatchIndices:
        return self._inner.early(self.number_of(i % len(self)) if self._ranges else i)

    def length_of(self, row: int) -> int:
        return self._inner.length_of(row)

    def size_of(self, batch: BatchIndices) -> LeftOut:
        return self._inner.size_of(batch)

    def __str__(self) -> str:
        count = sum(stop - first for first, stop in self._ranges)
        return f"{self._inner}; {count} batches are skipped"
