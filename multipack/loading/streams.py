"""Positions in iterable data sets, by the stateful protocol of torchdata.

Where the data set's iterator has a state, that is loaded after `iter`; the data set's own is loaded before.
Where neither has one, batches are counted, and read again to get there. The one rule: a state is taken right
behind the batch it belongs to.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from multipack.closing import close
from multipack.loading.feeds import STATE_VERSION, Pass, State, check_state
from multipack.order.cursor import Cursor
from multipack.order.stream import StreamPacker
from multipack.order.stream_pass import is_stateful

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamMark:
    """Where an iterable data set stands."""

    epoch: int | None = None
    """As set by `set_epoch`; None if it never was."""
    batches: int = 0
    dataset: Any = None
    """State of the data set behind the batch, where it has one and is not its own iterator."""
    iterator: Any = None
    """State of its iterator, where that has one."""
    ended: bool = False
    """The pass is over: the next one begins behind it."""
    workers: int = 0
    """Worker processes that read; 0 where this process does."""


class StreamFeed:
    """Rows of an iterable data set.

    Args:
        dataset: the data set.
        rows: gives the rows of each batch, read in this process.
    """

    def __init__(self, dataset: Any, rows: Iterable[Any]) -> None:
        self.source = dataset
        self.cursor: Cursor[StreamMark] = Cursor(StreamMark(), _start_of_stream)
        self.rows = rows
        self._end: tuple[int, StreamMark] | None = None
        """The last pass that was read to its end, and where that left the data set."""

    def open(self) -> Pass:
        number, start = self.cursor.begin()
        if start.workers:
            raise ValueError(self._other_workers(start, 0))
        if start.dataset is not None:
            self.source.load_state_dict(start.dataset)
        rows = iter(self.rows)
        if start.iterator is not None:
            dataset_iterator(rows).load_state_dict(start.iterator)
        elif start.dataset is None and not start.ended:
            self.skip(rows, start.batches)
        if start.ended:
            rows = iter(self.rows)
            start = _start_of_stream(start)
        return Pass(number, _Rows(self, number, rows, start))

    def begin_in(self, workers: int) -> tuple[int, StreamMark]:
        """Begin a pass that worker processes read: its number, and the mark it begins at.

        Raises:
            ValueError: the mark is of another number of workers.
        """
        number, start = self.cursor.begin()
        if start.batches and start.workers != workers:
            raise ValueError(self._other_workers(start, workers))
        self._end = number, StreamMark(start.epoch, ended=True, workers=workers)
        return number, start

    def skip(self, rows: Iterator[Any], batches: int) -> None:
        """Read `batches` again, which is all one can do without a state."""
        if not batches:
            return
        _logger.warning(
            "%s has no state of its own in this process, so %d batches are read again to resume behind "
            "them. Give it, or its iterator, state_dict and load_state_dict to avoid that.",
            type(self.source).__qualname__,
            batches,
        )
        for _ in range(batches):
            with contextlib.suppress(Exception):  # what failed then was counted, and fails again
                next(rows, None)

    def mark(self, iterator: Any, batches: int, epoch: int | None) -> StreamMark:
        """Where the data set and its iterator stand now, `batches` batches into the pass."""
        of_dataset = None if iterator is self.source else _state_of(self.source)
        return StreamMark(epoch, batches, of_dataset, _state_of(iterator))

    def read_to_end(self, number: int, mark: StreamMark) -> None:
        """Pass `number` has read all there is."""
        self._end = number, replace(mark, ended=True)

    def is_last(self, mark: Any) -> None:
        return None

    def ended(self, number: int) -> None:
        if self._end is not None and self._end[0] == number:
            self.cursor.took(number, self._end[1])

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.cursor.mark.epoch:
            self.cursor.restart_at(StreamMark(epoch))
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def state_dict(self) -> State:
        mark = self.cursor.mark
        return {
            "version": STATE_VERSION,
            "epoch": mark.epoch,
            "batches": mark.batches,
            "dataset": mark.dataset,
            "iterator": mark.iterator,
            "ended": mark.ended,
            "workers": mark.workers,
        }

    def load_state_dict(self, state: State) -> None:
        check_state(state, "dataset")
        if state["dataset"] is not None and not is_stateful(self.source):
            raise ValueError(
                f"the state holds one of the data set, and {type(self.source).__qualname__} cannot load one: "
                "build the loader over the data set it was built over, which has load_state_dict."
            )
        if state.get("epoch") is not None:
            self.set_epoch(state["epoch"])
        names = ("epoch", "batches", "dataset", "iterator", "ended", "workers")
        self.cursor.go_to(StreamMark(**{name: state[name] for name in names if name in state}))

    def _other_workers(self, start: StreamMark, workers: int) -> str:
        return (
            f"the state was saved with {start.workers} worker processes reading "
            f"{type(self.source).__qualname__}, and now {workers} do: their batches come in another order, "
            f"so rows would be repeated or lost. Use num_workers={start.workers}"
            + (", worker_type='process'." if start.workers else " or threads.")
        )


class _Rows:
    """Rows of each batch of one pass, with their marks. No generator, since an error of a row ends one `next`
    only."""

    def __init__(self, feed: StreamFeed, number: int, rows: Iterator[Any], start: StreamMark) -> None:
        self._feed = feed
        self._number = number
        self._rows = rows
        self._iterator = dataset_iterator(rows)
        self._mark = start

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> tuple[Any, StreamMark]:
        try:
            rows = next(self._rows)
        except StopIteration:
            end = self._feed.mark(self._iterator, self._mark.batches, self._mark.epoch)
            self._feed.read_to_end(self._number, end)
            raise
        except Exception:
            self._mark = replace(
                self._mark, batches=self._mark.batches + 1
            )  # it counts, though it is not there
            raise
        self._mark = self._feed.mark(self._iterator, self._mark.batches + 1, self._mark.epoch)
        return rows, self._mark

    def close(self) -> None:
        """End an iterator that was made for this pass, also while a thread waits in it, where it can be."""
        if self._iterator is not self._feed.source:
            close(self._iterator)


def dataset_iterator(rows: Any) -> Any:
    """The data set's own iterator, below torch's."""
    fetcher = getattr(rows, "_dataset_fetcher", None)
    return rows if fetcher is None else fetcher.dataset_iter


def is_stream(dataset: Any) -> bool:
    """Whether a data set is read by iterating, not by ids."""
    return isinstance(dataset, IterableDataset)


def is_own_stream(dataset: Any) -> bool:
    """Whether a data set is our own packed stream, which draws from no global generator."""
    return type(dataset) is StreamPacker


def _state_of(source: Any) -> Any:
    return source.state_dict() if is_stateful(source) else None


def _start_of_stream(mark: StreamMark) -> StreamMark:
    return StreamMark(mark.epoch)
