"""One pass over a DataLoader: what happens between the queue and the training loop.

The one rule: everything that follows the consumer (position, statistics, what accelerate is told) happens as a batch is yielded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils.pin_memory import pin_memory

from multipack.loading.accelerate_view import gradient_state
from multipack.loading.device import DeviceCopier, InFlight
from multipack.loading.prefetch import Prefetcher
from multipack.loading.stats import BatchSize, batch_size

if TYPE_CHECKING:
    from typing_extensions import Self

    from multipack.loading.loader import DataLoader


@dataclass(frozen=True, slots=True)
class Made:
    """A batch as it lies in the queue, with what must be known when it is yielded."""

    batch: Any
    size: BatchSize
    bin_slots: int
    mark: Any


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes batches in the threads: fetch, collate, count, start the copy."""

    fetch: Callable[[Any], Any]
    """What makes a batch of an item of the position."""
    capacity: int
    """Slots of a bin, 0 where there are no bins."""
    pin_for: str | None
    """Kind of the device to pin memory for."""
    copier: DeviceCopier | None

    def __call__(self, pair: tuple[Any, Any]) -> Made:
        item, mark = pair
        batch = self.fetch(item)
        size = batch_size(batch)
        if self.copier is not None:
            batch = self.copier.send(batch)
        elif self.pin_for is not None:
            batch = pin_memory(batch, self.pin_for)  # type: ignore[no-untyped-call]
        return Made(batch, size, self.capacity * num_bins(item), mark)


class LoaderIterator(Iterator[Any]):
    """The iterator of a DataLoader. Dropping or closing it ends its threads; the position counts what it yielded."""

    def __init__(
        self, loader: DataLoader[Any], prefetcher: Prefetcher[Made], copier: DeviceCopier | None
    ) -> None:
        self._loader = loader
        self._made = iter(prefetcher)
        self._copier = copier
        self._returned_at: float | None = None  # when the last batch was handed out
        self._batches_left: int | None = None  # known while accelerate listens, but not of a stream
        self._looks_ahead = False
        self._ahead: Made | None = None  # the batch after the next, if that one had to be looked for
        self._leave_accelerate: Callable[[], object] | None = None

    def __next__(self) -> Any:
        if self._returned_at is None:
            self._join_accelerate()
        stats = self._loader.stats
        queue_length, busy = self._made.ready, self._made.busy_seconds
        asked_at = perf_counter()
        try:
            made = self._take()
        except StopIteration:
            self._end()
            raise
        batch = made.batch
        if self._copier is not None and isinstance(batch, InFlight):
            batch = self._copier.receive(batch)
        now = perf_counter()
        if self._returned_at is None:
            stats.start_seconds += now - asked_at
        else:
            stats.wait_seconds += now - asked_at
            stats.loop_seconds += now - self._returned_at
        stats.count(made.size, made.bin_slots, queue_length, self._made.busy_seconds - busy)
        self._yield(made.mark)
        self._returned_at = now
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the threads of this pass, and wait for them up to a second."""
        self._made.close()
        if self._leave_accelerate is not None:
            self._leave_accelerate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> Made:
        """The next batch. accelerate is to know the last one as it is yielded: of a stream only the lack of another tells."""
        if not self._looks_ahead:
            return next(self._made)
        made = next(self._made) if self._ahead is None else self._ahead
        self._ahead = next(self._made, None)
        self._loader.end_of_dataloader = self._ahead is None
        return made

    def _yield(self, mark: Any) -> None:
        if self._is_newest():  # an older pass may go on, but the loader has only one position
            self._loader._position.yielded(mark)
        if self._batches_left is not None:
            self._batches_left -= 1
            self._loader.end_of_dataloader = self._batches_left == 0

    def _end(self) -> None:
        if self._is_newest():
            self._loader._position.ended()
        if self._leave_accelerate is not None:
            self._leave_accelerate()

    def _is_newest(self) -> bool:
        return self._loader._newest() is self

    def _join_accelerate(self) -> None:
        """Tell accelerate which loader is read, as its own loaders do: it synchronises gradients at `end_of_dataloader`."""
        state = gradient_state() if self._loader._is_accelerate_prepared else None
        if state is None or self._leave_accelerate is not None:
            return
        self._loader.end_of_dataloader = False
        self._batches_left = self._loader._position.remaining()
        self._looks_ahead = self._batches_left is None
        state._add_dataloader(self._loader)
        leave = weakref.finalize(self, state._remove_dataloader, self._loader)
        leave.atexit = False
        self._leave_accelerate = leave


def num_bins(item: Any) -> int:
    """Bins of a batch of ids, a selection or a batch that a worker process made of ids; 0 where there are none."""
    return len(getattr(item, "bin_offsets", (0,))) - 1
