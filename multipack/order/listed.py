"""Batch samplers that are not ours, as an order: read once a pass, in the order in which they yield.

What a foreign sampler must keep to, so that ranks can share it: a length, which is exact, and the same order
on every rank.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DistributedSampler

from multipack.order.batch import BatchIndices
from multipack.order.orders import Order

MOST_REPEATS = 4096
"""First batches that are kept for repeats: more ranks than that repeat them again."""


class ListedOrder(Order):
    """The batches of a foreign batch sampler. Batches are asked for in ascending order, but the first ones at
    any time.

    Raises:
        TypeError: it has no length.
        ValueError: its ranks could not agree.
    """

    def __init__(self, batch_sampler: Any, epoch: int = 0) -> None:
        self._batch_sampler = batch_sampler
        self.epoch = epoch
        # A sampler that follows `set_epoch`, or that draws nothing, has the same order whenever it is at the
        # same epoch.
        chain = _chain(batch_sampler)
        self.is_resumable = any(hasattr(s, "set_epoch") for s in chain) or all(
            not hasattr(s, "generator") for s in chain
        )
        self._source: Iterator[list[int]] | None = None
        self._num_read = 0
        self._first: list[BatchIndices] = []
        self._kept: dict[int, BatchIndices] = {}

    @classmethod
    def checked(cls, batch_sampler: Any) -> ListedOrder:
        """The order of a batch sampler whose ranks can agree."""
        if not isinstance(batch_sampler, Sized):
            raise TypeError(
                f"{type(batch_sampler).__qualname__} has no length, so ranks could not know when to stop. "
                "Give it __len__, or use StreamPacker for data of unknown length."
            )
        for sampler in _chain(batch_sampler):
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
                raise ValueError(
                    f"the batch sampler's DistributedSampler already deals rows to {sampler.num_replicas} "
                    "ranks: each rank would get a share of its share. Give it a sampler over all rows."
                )
            if getattr(sampler, "generator", ...) is None:
                raise ValueError(
                    f"{type(sampler).__qualname__} has no generator: it would draw another order on each "
                    "rank, and rows would be repeated and lost. Pass "
                    "generator=torch.Generator().manual_seed(seed), the same on every rank."
                )
        return cls(batch_sampler)

    def at(self, epoch: int) -> ListedOrder:
        return ListedOrder(self._batch_sampler, epoch)

    def __len__(self) -> int:
        self._tell_epoch()
        return len(self._batch_sampler)

    def has(self, i: int) -> bool:
        self._read_to(i)
        return i < self._num_read

    def batch(self, i: int) -> BatchIndices:
        self._read_to(i)
        for passed in [number for number in self._kept if number < i]:
            del self._kept[passed]
        return self._kept[i]

    def early(self, i: int) -> BatchIndices:
        return self._first[i % len(self._first)]

    @property
    def fingerprint(self) -> str:
        inner = self._batch_sampler
        described = {"batch_sampler": type(inner).__qualname__, "num_batches": len(self)}
        for name in ("batch_size", "drop_last"):
            if (value := getattr(inner, name, None)) is not None:
                described[name] = value
        return json.dumps(described, sort_keys=True)

    def __str__(self) -> str:
        return f"the batch sampler {type(self._batch_sampler).__qualname__} has {len(self)} batches"

    def _read_to(self, i: int) -> None:
        """Read up to batch `i`, or to the end, and keep what was read."""
        if self._source is None:
            self._tell_epoch()
            self._source = self._as_announced()
        for batch in itertools.islice(self._source, max(0, i + 1 - self._num_read)):
            ids = BatchIndices(batch)
            self._kept[self._num_read] = ids
            if len(self._first) < MOST_REPEATS:
                self._first.append(ids)
            self._num_read += 1

    def _as_announced(self) -> Iterator[list[int]]:
        """The batches, which must be as many as `len` says: steps are planned with it."""
        announced, count = len(self._batch_sampler), 0
        for batch in self._batch_sampler:
            count += 1
            if count > announced:
                break
            yield batch
        if count != announced:
            raise ValueError(
                f"{type(self._batch_sampler).__qualname__} has a length of {announced} but gives "
                f"{'more' if count > announced else count} batches: ranks and schedules that count on the "
                "length would wait or stop short. Make its __len__ exact."
            )

    def _tell_epoch(self) -> None:
        for target in _chain(self._batch_sampler):
            set_epoch = getattr(target, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
                return


def _chain(batch_sampler: Any) -> tuple[Any, Any]:
    """A batch sampler and the sampler of rows below it, if there is one."""
    return batch_sampler, getattr(batch_sampler, "sampler", None)
