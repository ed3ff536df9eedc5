"""One pass over a DataLoader: what happens between the source of batches and the training loop.

The one rule: everything that follows the consumer (its cursor, statistics, what accelerate is told) happens
as a batch is yielded.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data._utils.pin_memory import pin_memory

from multipack.closing import Closable
from multipack.frameworks import AccelerateListener
from multipack.loading.device import DeviceCopier, InFlight
from multipack.loading.feeds import Feed
from multipack.loading.prefetch import Prefetcher, PrefetchIterator
from multipack.loading.stats import BatchSize, LoaderStats, batch_size
from multipack.order.batch import LeftOut

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Made:
    """A batch as it waits, with what must be known when it is yielded."""

    batch: Any
    size: BatchSize
    bin_slots: int
    left_out: LeftOut
    mark: Any


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes batches: fetch, collate, count, start the copy."""

    fetch: Callable[[Any], Any]
    """What makes a batch of an item of the feed."""
    pin_for: str | None
    """Kind of the device to pin memory for."""
    copier: DeviceCopier | None

    def __call__(self, pair: tuple[Any, Any]) -> Made:
        item, mark = pair
        return self.finish(self.fetch(item), item, mark)

    def finish(self, batch: Any, item: Any, mark: Any) -> Made:
        """Count a batch that was made of `item`, and start its copy."""
        size = batch_size(batch)
        if self.copier is not None:
            batch = self.copier.send(batch)
        elif self.pin_for is not None:
            batch = pin_memory(batch, self.pin_for)  # type: ignore[no-untyped-call]  # torch's
        num_bins = len(getattr(item, "bin_offsets", (0,))) - 1
        bin_slots = num_bins * getattr(item, "bin_capacity", 0)
        return Made(batch, size, bin_slots, getattr(item, "left_out", LeftOut()), mark)


class Source(Protocol):
    """Batches of one pass."""

    @property
    def number(self) -> int:
        """Of the feed's cursor."""

    @property
    def ready(self) -> int:
        """Batches that wait now."""

    @property
    def busy_seconds(self) -> float:
        """Wall seconds spent on the batches so far, beside the consumer."""

    def __next__(self) -> Made: ...
    def close(self) -> None: ...
    def dropped(self) -> None:
        """The iterator over it was garbage; called by its finalizer."""


class ThreadPass:
    """One pass by our own threads, or in the consumer's where the queue has depth 0."""

    def __init__(
        self, feed: Feed, *, draw: Callable[[], None] | None, takes_first: bool, **prefetcher: Any
    ) -> None:
        """`draw` is called once the pass is open; `takes_first`: the first item is taken now, not by a thread."""
        self.number, items = feed.open()
        if draw is not None:
            draw()
        if takes_first:
            items = _with_first_taken(items)
        # Without threads the caller's objects stay the caller's.
        source = _Once(items) if prefetcher["depth"] else items
        self._made: PrefetchIterator[Made] = iter(Prefetcher(source, **prefetcher))

    @property
    def ready(self) -> int:
        """Batches that wait now."""
        return self._made.ready

    @property
    def busy_seconds(self) -> float:
        """Wall seconds the threads spent on the batches so far."""
        return self._made.busy_seconds

    def __next__(self) -> Made:
        return next(self._made)

    def close(self) -> None:
        """End the threads, and wait for them up to a second."""
        self._made.close()

    def dropped(self) -> None:
        """Nothing: the threads have a finalizer of their own, which does not wait."""


class LoaderIterator(Iterator[Any]):
    """The iterator of a DataLoader. Dropping or closing it ends its threads; the cursor counts what it
    yielded.

    Args:
        feed: the source of batches.
        open_source: begins a pass over it.
        stats: of the loader.
        copier: of batches to a device.
        listener: what accelerate is told.
        loader: whose iterator this is.
    """

    def __init__(
        self,
        feed: Feed,
        open_source: Callable[[], Source],
        *,
        stats: LoaderStats,
        copier: DeviceCopier | None,
        listener: AccelerateListener,
        loader: Any,
    ) -> None:
        self._feed = feed
        self._open_source = open_source
        self._source = self._open()
        self._stats = stats
        self._copier = copier
        self._listener = listener
        self._loader = loader
        self._returned_at: float | None = None  # when the last batch was handed out
        self._ahead: Made | None = None  # the batch after the next, if that one had to be looked for

    def __next__(self) -> Any:
        if self._returned_at is None:
            self._listener.began(self)
        if self._feed.cursor.was_interrupted(self._source.number):
            self._source.close()
            self._ahead = None
            self._source = self._open()
        queue_length, busy = self._source.ready, self._source.busy_seconds
        asked_at = perf_counter()
        try:
            made, is_last = self._take()
        except StopIteration:
            self._feed.ended(self._source.number)
            self.close()
            raise
        batch = made.batch
        if self._copier is not None and isinstance(batch, InFlight):
            batch = self._copier.receive(batch)
        now = perf_counter()
        self._stats.waited(asked_at, now, self._returned_at)
        self._stats.count(
            made.size, made.bin_slots, made.left_out, queue_length, self._source.busy_seconds - busy
        )
        self._feed.cursor.took(self._source.number, made.mark)
        self._listener.yielded(is_last)
        self._returned_at = now
        return batch

    def __len__(self) -> int:
        return len(self._loader)

    def __reduce__(self) -> tuple[Any, ...]:
        # Threads and worker processes stay behind: a copy resumes in a pass of its own, over a copy of the loader.
        return _resumed, (self._loader,)

    @property
    def _workers(self) -> list[Any]:
        """Worker processes, where torch's own iterator has them; monitoring tools look there."""
        return getattr(self._source, "processes", [])

    def close(self) -> None:
        """End the threads or workers of this pass, and wait for them up to a second."""
        self._source.close()
        self._listener.ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> Source:
        source = self._open_source()
        weakref.finalize(self, source.dropped).atexit = False
        return source

    def _take(self) -> tuple[Made, bool]:
        """The next batch, and for accelerate whether it is the last: of a stream only the lack of another
        tells."""
        made = next(self._source) if self._ahead is None else self._ahead
        self._ahead = None
        if not self._listener.listens:
            return made, False
        is_last = self._feed.is_last(made.mark)
        if is_last is None:
            self._ahead = next(self._source, None)
            is_last = self._ahead is None
        return made, is_last


def _resumed(loader: Any) -> Iterator[Any]:
    """A pass over a loader from where it stands."""
    loader.load_state_dict(loader.state_dict())
    return iter(loader)


def fetch_rows(dataset: Any, collate_fn: Callable[[Any], Any], in_batches: bool, ids: Any) -> Any:
    """Rows of the ids as torch fetches them, collated."""
    if not in_batches:
        return collate_fn(dataset[ids])
    get_many = getattr(dataset, "__getitems__", None)
    return collate_fn(get_many(ids) if get_many else [dataset[i] for i in ids])


class _Once:
    """Items that are closed with the pass that reads them, also where they are no generator."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


def _with_first_taken(items: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Takes the first item now: a sampler may draw from the global random state for it, which must not happen
    beside the consumer's own draws."""
    first = next(items, None)
    return iter(()) if first is None else Closable(itertools.chain([first], items), lambda: items)
