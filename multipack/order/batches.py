"""Batches in global order, as a rank's dealing reads them: by number, and only as many as it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multipack.order.balance import batch_cost
from multipack.order.plan import EpochPlan
from multipack.order.tail import BatchIndices


class Batches(Protocol):
    """The global batches of one epoch. `start` never falls from call to call."""

    def count(self, start: int, most: int) -> int:
        """How many of the `most` batches from `start` on exist."""

    def batch(self, i: int) -> BatchIndices:
        """Batch `i`, which `count` has found."""

    def early(self, i: int) -> BatchIndices:
        """A batch of the epoch to repeat on a rank that would have none; `i` wraps around."""

    def costs(self, start: int, count: int, hidden_size: int) -> NDArray[np.float64]:
        """Costs of batches start..start+count-1."""

    def length_of(self, row: int) -> int:
        """Tokens of a row, or 1 where lengths are unknown."""


class PlanBatches:
    """Batches of the bins of a plan; only the windows that are asked for are planned."""

    def __init__(self, plan: EpochPlan, bins_per_batch: int, drop_last: bool) -> None:
        self.plan = plan
        self.bins_per_batch = bins_per_batch
        self.drop_last = drop_last

    def at_epoch(self, epoch: int) -> PlanBatches:
        """The same for another epoch."""
        return PlanBatches(self.plan.at_epoch(epoch), self.bins_per_batch, self.drop_last)

    def __len__(self) -> int:
        return self._whole(len(self.plan))

    def count(self, start: int, most: int) -> int:
        size = self.bins_per_batch
        if self.plan.has_bin((start + most) * size - 1):
            return most
        return min(most, max(0, self._whole(len(self.plan)) - start))  # every window is planned by now

    def batch(self, i: int) -> BatchIndices:
        size = self.bins_per_batch
        return BatchIndices.of_bins(rows.tolist() for rows in self.plan.bins(i * size, (i + 1) * size))

    def early(self, i: int) -> BatchIndices:
        return self.batch(i % len(self))

    def costs(self, start: int, count: int, hidden_size: int) -> NDArray[np.float64]:
        size = self.bins_per_batch
        work = batch_cost(*self.plan.costs(start * size, (start + count) * size), hidden_size)
        summed: NDArray[np.float64] = np.add.reduceat(work, np.arange(0, len(work), size))
        return summed

    def length_of(self, row: int) -> int:
        return int(self.plan.lengths[row])

    def _whole(self, num_bins: int) -> int:
        return num_bins // self.bins_per_batch if self.drop_last else -(-num_bins // self.bins_per_batch)


class ListedBatches:
    """Batches of a foreign batch sampler, read in its order; its first ones are kept to be repeated."""

    def __init__(self, source: Iterator[list[int]]) -> None:
        self._source = source
        self._start = 0
        self._kept: list[BatchIndices] = []
        self._first: list[BatchIndices] = []

    def count(self, start: int, most: int) -> int:
        skipped = min(start - self._start, len(self._kept))
        del self._kept[:skipped]
        for batch in itertools.islice(self._source, start - self._start - skipped):
            self._keep_first(BatchIndices(batch))
        self._start = start
        for batch in itertools.islice(self._source, max(0, most - len(self._kept))):
            self._kept.append(BatchIndices(batch))
            self._keep_first(self._kept[-1])
        return min(most, len(self._kept))

    def batch(self, i: int) -> BatchIndices:
        return self._kept[i - self._start]

    def early(self, i: int) -> BatchIndices:
        return self._first[i % len(self._first)]

    def costs(self, start: int, count: int, hidden_size: int) -> Any:
        raise ValueError("a batch sampler that does not pack knows no costs.")

    def length_of(self, row: int) -> int:
        return 1

    def _keep_first(self, batch: BatchIndices) -> None:
        """Remember the batches that a tail of up to as many ranks could repeat."""
        if len(self._first) < MOST_REPEATS:
            self._first.append(batch)


MOST_REPEATS = 4096
"""Batches of a foreign sampler kept for repeats: more ranks than that repeat them again."""
