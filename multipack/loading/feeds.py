"""Where a loader takes its batches from, and what a saved state of each source holds.

Every source is a feed with the same methods, and every item comes with its mark: where a run resumes once the
item's batch was consumed. The one rule: batches that were only prefetched do not count. They are made again
after a resume, so nothing is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from multipack.order.batch import BatchIndices, Place
from multipack.order.cursor import Cursor
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler

State = dict[str, Any]
STATE_VERSION = 1


class Pass(NamedTuple):
    """One reading of a source."""

    number: int
    """Of the cursor; see `Cursor.begin`."""
    items: Iterator[tuple[Any, Any]]
    """What batches are made of, each with its mark."""


class Feed(Protocol):
    """A source of batches. `open` is called in the consumer's thread; its items may be taken in any one
    thread at a time."""

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

    def __init__(
        self,
        sampler: MultipackBatchSampler | DistributedBatchSampler,
        ahead: Callable[[Iterator[BatchIndices]], Iterator[BatchIndices]] | None = None,
    ) -> None:
        """`ahead` gives the same batches, and takes some of them early to see which rows come."""
        self.source = sampler
        self.cursor = sampler.cursor
        self._ahead = ahead

    def open(self) -> Pass:
        number, place = self.cursor.begin()
        batches = self.source.read(place)
        if self._ahead is not None:
            batches = self._ahead(batches)
        return Pass(number, ((ids, ids.after) for ids in batches))

    def is_last(self, mark: Place) -> bool:
        return mark.starts_epoch

    def ended(self, number: int) -> None:
        pass  # the last mark said so

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)

    def state_dict(self) -> State:
        return {"version": STATE_VERSION, "sampler": self.source.state_dict()}

    def load_state_dict(self, state: State) -> None:
        check_state(state, "sampler")
        self.source.load_state_dict(state["sampler"])


def check_state(state: Any, key: str) -> None:
    """Refuse what is no state of a loader over such data."""
    if not isinstance(state, dict) or "version" not in state or key not in state:
        raise ValueError(
            f"this is not the state of a multipack loader over such data: {state!r:.200}. A state fits the "
            "kind of sampler it was saved with: one of multipack's, another one, or an iterable data set."
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this multipack reads version {STATE_VERSION}."
        )
