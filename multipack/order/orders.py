"""The order of the batches of an epoch, before ranks: of packed bins, or of rows without packing.

The one rule: an order is a pure function of its inputs and the epoch. Looking at it moves nothing, so every
rank and every thread may ask for any batch at any time.
"""

from __future__ import annotations

import copy
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multipack.arguments import whole_number
from multipack.data.part import Part
from multipack.order.balance import batch_cost
from multipack.order.batch import BatchIndices, LeftOut
from multipack.order.concat import ConcatPlan
from multipack.order.plan import EpochPlan

Rows = NDArray[np.int64]
Permutation = Callable[[int, int, int], Rows]


class Order(ABC):
    """The global batches of one epoch."""

    epoch: int
    """Names the order of the data."""
    num_rows: int | None = None
    """Rows of the data set; None where that is unknown."""
    is_resumable: bool = True
    """Whether the epoch alone names the order, so that a place in it can be saved."""

    @abstractmethod
    def at(self, epoch: int) -> Order:
        """The order of another epoch over the same data."""

    @abstractmethod
    def __len__(self) -> int:
        """Exact number of batches."""

    @abstractmethod
    def has(self, i: int) -> bool:
        """Whether batch `i` exists, found with as little planning as possible."""

    @abstractmethod
    def batch(self, i: int) -> BatchIndices:
        """Batch `i`, which exists."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """What the order depends on besides the epoch, as canonical JSON."""

    @abstractmethod
    def __str__(self) -> str:
        """What it consists of, in numbers, for messages."""

    @property
    def capacity(self) -> int | None:
        """Token slots of a bin; None where nothing is packed."""
        return None

    @property
    def left_out(self) -> LeftOut:
        """What `drop_last` leaves out of the epoch."""
        return LeftOut()

    def costs(self, start: int, stop: int, hidden_size: int) -> NDArray[np.float64]:
        """Work of batches start..stop-1, see `batch_cost`.

        Raises:
            ValueError: lengths are unknown.
        """
        raise ValueError(
            f"balance needs the costs of batches, which are unknown: {self}. Use MultipackBatchSampler, or "
            "balance='none'."
        )

    def early(self, i: int) -> BatchIndices:
        """A batch of the epoch to repeat on a rank that would have none; `i` wraps around."""
        return self.batch(i % len(self))

    def length_of(self, row: int) -> int:
        """Tokens of a row, or 1 where lengths are unknown."""
        return 1

    def size_of(self, batch: BatchIndices) -> LeftOut:
        """Sequences and tokens of a batch."""
        return LeftOut(len(batch))


def count_batches(order: Order, start: int, most: int) -> int:
    """How many of the `most` batches from `start` on exist; plans no further than that."""
    if order.has(start + most - 1):
        return most
    return min(most, max(0, len(order) - start))  # its end was found, so its length is known


class BinOrder(Order):
    """Batches of `bins_per_batch` neighbouring bins of a plan; only windows that are asked for are
    planned."""

    def __init__(
        self, plan: EpochPlan | ConcatPlan, bins_per_batch: int = 1, drop_last: bool = False
    ) -> None:
        self.plan = plan
        self.bins_per_batch = whole_number("bins_per_batch", bins_per_batch, 1)
        self.drop_last = bool(drop_last)
        self.epoch = plan.epoch
        self.num_rows = plan.num_rows
        self._recent: dict[int, BinOrder] = {
            plan.epoch: self
        }  # shared by all epochs: what was planned is kept

    @property
    def capacity(self) -> int:
        return self.plan.capacity

    def at(self, epoch: int) -> BinOrder:
        found = self._recent.get(epoch)
        if found is None:
            found = BinOrder(self.plan.at_epoch(epoch), self.bins_per_batch, self.drop_last)
            found._recent = self._recent
            for other in list(self._recent)[: 1 - _RECENT_EPOCHS]:
                self._recent.pop(other, None)
            self._recent[epoch] = found
        return found

    def __len__(self) -> int:
        num_bins = len(self.plan)
        return num_bins // self.bins_per_batch if self.drop_last else -(-num_bins // self.bins_per_batch)

    def has(self, i: int) -> bool:
        first = i * self.bins_per_batch
        return self.plan.has_bin(first + self.bins_per_batch - 1 if self.drop_last else first)

    def batch(self, i: int) -> BatchIndices:
        size = self.bins_per_batch
        batch = BatchIndices.of_bins(self.plan.ids(i * size, (i + 1) * size), bin_capacity=self.capacity)
        if self.plan.groups is not None:
            batch.groups = tuple(self.plan.groups.of(batch).tolist())
        return batch

    def costs(self, start: int, stop: int, hidden_size: int) -> NDArray[np.float64]:
        size = self.bins_per_batch
        work = batch_cost(*self.plan.costs(start * size, stop * size), hidden_size)
        summed: NDArray[np.float64] = np.add.reduceat(work, np.arange(0, len(work), size))
        return summed

    def length_of(self, row: int) -> int:
        return row.length if isinstance(row, Part) else int(self.plan.lengths[row])

    def size_of(self, batch: BatchIndices) -> LeftOut:
        return LeftOut(len(batch), sum(map(self.length_of, batch)))

    @property
    def left_out(self) -> LeftOut:
        if not self.drop_last:
            return LeftOut()
        return self.size_of(
            BatchIndices.of_bins(self.plan.ids(len(self) * self.bins_per_batch, len(self.plan)))
        )

    @property
    def fingerprint(self) -> str:
        shape = {"bins_per_batch": self.bins_per_batch, "drop_last": self.drop_last}
        return json.dumps({**self.plan.inputs(), **shape}, sort_keys=True)

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{plan.num_rows} sequences of {plan.num_tokens} tokens make {len(plan)} bins of {plan.capacity} "
            f"tokens, {len(self)} batches of {self.bins_per_batch}"
        )


_RECENT_EPOCHS = 2  # the one that is trained on and the one that a prefetcher has begun


def torch_permutation(num_rows: int, seed: int, epoch: int) -> Rows:
    """The order that torch's DistributedSampler of one rank has in an epoch."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_rows, generator=generator).numpy()


@dataclass(frozen=True)
class RowOrder(Order):
    """Batches of rows that are not packed, in a seeded order.

    Args:
        num_rows: rows of the data set.
        batch_size: rows of a batch; the last one may have fewer.
        seed, shuffle: name the order; False keeps that of the data set.
        permutation: (num_rows, seed, epoch) -> row ids, int64 [num_rows], each once.
    """

    num_rows: int
    batch_size: int = 1
    seed: int = 0
    shuffle: bool = True
    permutation: Permutation = torch_permutation
    epoch: int = 0

    def __post_init__(self) -> None:
        whole_number("num_rows", self.num_rows, 1)
        whole_number("batch_size", self.batch_size, 1)
        whole_number("seed", self.seed)

    @cached_property
    def _rows(self) -> Rows:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return self.permutation(self.num_rows, self.seed, self.epoch)

    def at(self, epoch: int) -> RowOrder:
        return replace(self, epoch=epoch)

    def __len__(self) -> int:
        return math.ceil(self.num_rows / self.batch_size)

    def has(self, i: int) -> bool:
        return i < len(self)

    def batch(self, i: int) -> BatchIndices:
        return BatchIndices(self._rows[i * self.batch_size : (i + 1) * self.batch_size].tolist())

    @property
    def fingerprint(self) -> str:
        # The first four are what positions held when torch's BatchSampler gave this order; see
        # `check_fingerprint`.
        described: dict[str, Any] = {
            "batch_sampler": "BatchSampler",
            "num_batches": len(self),
            "drop_last": False,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "permutation": self.permutation.__name__,
        }
        return json.dumps(described, sort_keys=True)

    def __str__(self) -> str:
        return f"{self.num_rows} rows make {len(self)} batches of {self.batch_size}"


class BatchOrder(Order):
    """Batches that were put together beforehand, the same in every epoch."""

    is_resumable = False  # nothing names them

    def __init__(self, batches: Sequence[BatchIndices], epoch: int = 0) -> None:
        self._batches = batches
        self.epoch = epoch

    def at(self, epoch: int) -> BatchOrder:
        return BatchOrder(self._batches, epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def has(self, i: int) -> bool:
        return i < len(self._batches)

    def batch(self, i: int) -> BatchIndices:
        return copy.copy(self._batches[i])

    @property
    def fingerprint(self) -> str:
        return json.dumps({"num_batches": len(self)})

    def __str__(self) -> str:
        return f"{len(self)} batches were put together"
