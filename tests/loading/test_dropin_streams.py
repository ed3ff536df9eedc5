"""Iterable data sets and the stateful protocol of torchdata, in a script that changes its import line.

The rule of the protocol (torchdata's StatefulDataLoader): where `iter(dataset)` has a state, the state is the
iterator's and is loaded after `iter`; otherwise it is the data set's and is loaded before. A state saved at
the end of a pass goes on with the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dropin_cases import both, plain, read
from torch.utils.data import IterableDataset, get_worker_info

from multipack import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*is deprecated")  # torchdata calls it
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 0},
    {"num_workers": 1, "worker_type": "thread"},
    {"num_workers": 2, "worker_type": "thread"},
]


class Live(IterableDataset[int]):
    """A live stream: it is its own iterator, and what was taken is gone."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.taken += 1
        if self.taken > 40:
            raise StopIteration
        return self.taken


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}], ids=str)
def test_a_look_at_one_batch_takes_one_batch_of_a_live_stream(asked: dict[str, Any]) -> None:
    def run(loader_class: Any) -> Any:
        loader = loader_class(Live(), batch_size=2, **asked)
        return plain(next(iter(loader))), read(loader)

    ours, torchs = both(run)
    assert ours == torchs
    assert ours[1][0] == [3, 4]


class OwnIterator(IterableDataset[int]):
    """Its own iterator with a state; `iter` starts it over."""

    def __init__(self) -> None:
        self.i = 0

    def __iter__(self) -> Iterator[int]:
        self.i = 0
        return self

    def __next__(self) -> int:
        if self.i >= 11:
            raise StopIteration
        self.i += 1
        return self.i - 1

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


class Counter:
    """An iterator with a state."""

    def __init__(self) -> None:
        self.i = 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        if self.i >= 11:
            raise StopIteration
        self.i += 1
        return self.i - 1

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


class StatefulIterator(IterableDataset[int]):
    """The data set has no state, its iterator has."""

    def __iter__(self) -> Iterator[int]:
        return Counter()


class BothStateful(IterableDataset[int]):
    """The data set's state is loaded before `iter`, which reads it; the iterator's after."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return Shifted(100 * self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Shifted(Counter):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def __next__(self) -> int:
        return self.shift + super().__next__()


class Shuffled(IterableDataset[int]):
    """Order by epoch; keeps (epoch, row) itself and counts its epochs."""

    def __init__(self) -> None:
        self.epoch, self.i, self.resume = 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(11, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        start, self.resume = self.resume, 0
        for self.i in range(start + 1, 12):
            yield order[self.i - 1]
        self.epoch, self.i = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.resume, self.i = state["epoch"], state["i"], state["i"]


class Plain(IterableDataset[int]):
    """No state anywhere: rows are counted, and read again to get there."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


STREAMS = [OwnIterator, StatefulIterator, BothStateful, Shuffled, Plain]


def saved_at(loader_class: Any, dataset: Any, passes: int, batches: int, **arguments: Any) -> Any:
    """What follows a state saved so many passes and batches on: by the loader that saved it, and by a new
    one."""
    loader = loader_class(dataset(), **arguments)
    for _ in range(passes):
        list(loader)
    iterator = iter(loader) if batches else None
    for _ in range(batches):
        next(iterator)  # type: ignore[arg-type]  # there is one where batches are taken
    state = loader.state_dict()
    rest = [plain(batch) for batch in iterator] if iterator is not None else read(loader)
    resumed = loader_class(dataset(), **arguments)
    resumed.load_state_dict(state)
    return rest, read(resumed), read(resumed)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("batch_size", [None, 2, 3])
@pytest.mark.parametrize("dataset", STREAMS)
@pytest.mark.parametrize(("passes", "batches"), [(0, 1), (0, 3), (1, 2), (2, 0)])
def test_a_state_goes_on_where_torchdatas_does(
    dataset: Any, passes: int, batches: int, batch_size: int | None, way: dict[str, Any]
) -> None:
    arguments = {"batch_size": batch_size, "collate_fn": list if batch_size else int}
    rest, resumed, next_pass = saved_at(DataLoader, dataset, passes, batches, **arguments, **way)
    assert resumed == rest
    theirs = saved_at(StatefulDataLoader, dataset, passes, batches, num_workers=0, **arguments)
    assert (rest, resumed, next_pass) == theirs


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dataset", STREAMS)
def test_a_state_saved_behind_the_last_batch_goes_on_with_the_next_pass(
    dataset: Any, way: dict[str, Any]
) -> None:
    # The loop has seen StopIteration, so the pass is over: 11 rows, then the next pass from its start.
    loader = DataLoader(dataset(), batch_size=None, **way)
    iterator = iter(loader)
    assert len(list(iterator)) == 11
    state = loader.state_dict()
    resumed = DataLoader(dataset(), batch_size=None, **way)
    resumed.load_state_dict(state)
    assert read(resumed) == read(loader)
    assert len(read(resumed)) == 11


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_map_style_data_saved_at_the_end_of_a_pass_goes_on_with_the_next(workers: int) -> None:
    loader = DataLoader(range(10), batch_size=3, num_workers=workers)
    list(loader)
    resumed = DataLoader(range(10), batch_size=3, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed) == read(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


class Sharded(IterableDataset[int]):
    """Each worker reads its own rows, without a state."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, 12, step))


@pytest.mark.parametrize("dataset", [OwnIterator, StatefulIterator, Shuffled, Plain, Sharded])
@pytest.mark.parametrize("workers", [1, 2])
def test_in_worker_processes_a_state_goes_on_exactly_or_is_refused_when_it_is_saved(
    dataset: Any, workers: int
) -> None:
    loader = DataLoader(dataset(), batch_size=2, collate_fn=list, num_workers=workers)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(2)]
    try:
        state = loader.state_dict()
    except ValueError as refused:
        assert "num_workers" in str(refused)  # the remedy is named  # noqa: PT017
        return
    resumed = DataLoader(dataset(), batch_size=2, collate_fn=list, num_workers=workers)
    resumed.load_state_dict(state)
    assert first + read(resumed) == read(
        DataLoader(dataset(), batch_size=2, collate_fn=list, num_workers=workers)
    )
