"""Where a loader takes its batches from, and what a saved state of each source holds.

Every source is a feed with the same methods, and every item comes with its mark: where a run resumes once the item's batch was
consumed. The one rule: batches that were only prefetched do not count. They are made again after a resume, so nothing is lost or
repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterableDataset

from multipack.order.cursor import Cursor
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.stream import StreamPacker

State = dict[str, Any]
STATE_VERSION = 1

_logger = logging.getLogger(__name__)


class Pass(NamedTuple):
    """One reading of a source."""

    number: int
    """Of the cursor; see `Cursor.begin`."""
    items: Iterator[tuple[Any, Any]]
    """What batches are made of, each with its mark."""


class Feed(Protocol):
    """A source of batches. `open` is called in the consumer's thread; its items may be taken in any one thread at a time."""

    source: Any
    """The sampler or data set that is read."""
    cursor: Cursor[Any]

    def open(self) -> Pass:
        """Begin a pass at the cursor."""

    def is_last(self, mark: Any) -> bool | None:
        """Whether the item with this mark is the last of its pass; None where that is unknown."""

    def ended(self, number: int) -> None:
        """The pass yielded all it had."""

    def set_epoch(self, epoch: int) -> None:
        """The caller goes to an epoch."""

    def state_dict(self) -> State:
        """Plain ints, strings and lists; what a data set adds is its own affair."""

    def load_state_dict(self, state: State) -> None:
        """The next batch is the one that comes there. ValueError when it cannot be."""


class SamplerFeed:
    """Ids of our samplers, whose batches carry their marks and whose cursor is their own."""

    def __init__(self, sampler: MultipackBatchSampler | DistributedBatchSampler) -> None:
        self.source = sampler
        self.cursor = sampler.cursor

    def open(self) -> Pass:
        number, place = self.cursor.begin()
        return Pass(number, ((ids, ids.after) for ids in self.source.read(place)))

    def is_last(self, mark: Any) -> bool:
        return bool(mark.batches == mark.micro_steps == 0)

    def ended(self, number: int) -> None:
        pass  # the last mark said so

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)

    def state_dict(self) -> State:
        return {"version": STATE_VERSION, "sampler": self.source.state_dict()}

    def load_state_dict(self, state: State) -> None:
        check_state(state, "sampler")
        self.source.load_state_dict(state["sampler"])


@dataclass(frozen=True, slots=True)
class StreamMark:
    """Where an iterable data set stands."""

    batches: int = 0
    dataset: Any = None
    """Its own state behind the batch; None where it has none."""


class StreamFeed:
    """Rows of an iterable data set; its own state after each batch, where it has `state_dict` and `load_state_dict`.

    Args:
        dataset: the data set.
        rows: gives the rows of each batch; None where torch's own iterator reads them.
    """

    def __init__(self, dataset: Any, rows: Iterable[Any] | None) -> None:
        self.source = dataset
        self.cursor: Cursor[StreamMark] = Cursor(StreamMark(), _start_of_stream)
        self._rows = rows
        self._is_stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")

    def open(self) -> Pass:
        number, start = self.cursor.begin()
        if start.batches:
            self.source.load_state_dict(start.dataset)
        return Pass(number, self._read(start.batches))

    def _read(self, batches: int) -> Iterator[tuple[Any, StreamMark]]:
        assert self._rows is not None
        for count, rows in enumerate(self._rows, batches + 1):
            yield rows, self.mark(count)

    def mark(self, batches: int) -> StreamMark:
        """Where the data set stands now, `batches` batches into the pass."""
        return StreamMark(batches, self.source.state_dict() if self._is_stateful else None)

    def is_last(self, mark: Any) -> None:
        return None

    def ended(self, number: int) -> None:
        self.cursor.took(number, StreamMark())

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def state_dict(self) -> State:
        mark = self.cursor.mark
        if mark.batches and mark.dataset is None:
            _logger.warning(self.unknown(mark.batches))
        return {"version": STATE_VERSION, "batches": mark.batches, "dataset": mark.dataset}

    def load_state_dict(self, state: State) -> None:
        check_state(state, "dataset")
        if state["batches"] and (state["dataset"] is None or not self._is_stateful):
            raise ValueError(self.unknown(state["batches"]))
        self.cursor.go_to(StreamMark(state["batches"], state["dataset"]))

    def unknown(self, batches: int) -> str:
        """Why a position cannot be resumed, and the remedy."""
        return (
            f"{batches} batches of the iterable data set {type(self.source).__qualname__} were yielded, but its position is unknown, so "
            "this state cannot be resumed: it has no state_dict and load_state_dict, or was read in worker processes. Give it both "
            "and use worker_type='thread', or begin the epoch again without this state."
        )


def check_state(state: Any, key: str) -> None:
    """Refuse what is no state of a loader over such data."""
    if not isinstance(state, dict) or "version" not in state or key not in state:
        raise ValueError(
            f"this is not the state of a multipack loader over such data: {state!r:.200}. A state fits the kind of sampler it "
            "was saved with: one of multipack's, another one, or an iterable data set."
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this multipack reads version {STATE_VERSION}."
        )


def is_stream(dataset: Any) -> bool:
    """Whether a data set is read by iterating, not by ids."""
    return isinstance(dataset, IterableDataset)


def is_own_stream(dataset: Any) -> bool:
    """Whether a data set is our own packed stream, which draws from no global generator."""
    return type(dataset) is StreamPacker


def _start_of_stream(mark: StreamMark) -> StreamMark:
    return StreamMark()
