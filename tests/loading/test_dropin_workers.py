"""Worker functions and worker numbers mean what they mean in torch, in a script that changes its import line.

`worker_init_fn` runs in the worker that it prepares, before the data set is touched there, with
`torch.initial_seed()` equal to the pass's base seed + number, and the training process keeps its own random
states.
"""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dropin_cases import Rows, both, read
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from multipack import DataLoader

PROCESSES = [{}, {"worker_type": "process"}]


def reseed(number: int) -> None:
    """PyTorch's recipe for numpy and random in workers."""
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed() % 2**32)


def augmented(index: int) -> float:
    return index + float(np.random.rand()) + random.random()


def states() -> list[Any]:
    """The three global random states of this process."""
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_reseeding_recipe_gives_torchs_numbers_and_new_ones_each_epoch(persistent: bool) -> None:
    def run(loader_class: Any) -> Any:
        torch.manual_seed(0)
        np.random.seed(123)
        random.seed(4)
        loader = loader_class(
            Rows(augmented, 8),
            batch_size=4,
            num_workers=2,
            worker_init_fn=reseed,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(0),
        )
        return [read(loader) for _ in range(3)], states()

    (epochs, after), torchs = both(run)
    assert (epochs, after) == torchs
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_seed_worker_of_a_framework_leaves_the_shuffle_and_the_loop_alone(framework: str) -> None:
    if framework == "transformers":
        utilities = pytest.importorskip("transformers.trainer_utils")
        init = functools.partial(utilities.seed_worker, num_workers=1, rank=0)
    else:
        seed = pytest.importorskip("lightning.fabric.utilities.seed")
        init = functools.partial(seed.pl_worker_init_function, rank=0)

    def run(loader_class: Any) -> Any:
        torch.manual_seed(42)
        loader = loader_class(range(12), batch_size=4, shuffle=True, num_workers=1, worker_init_fn=init)
        epochs = [[(batch, torch.rand(1).item()) for batch in read(loader)] for _ in range(4)]
        return epochs, torch.initial_seed()

    (epochs, seed_after), torchs = both(run)
    assert (epochs, seed_after) == torchs
    assert seed_after == 42
    assert len({str([batch for batch, _ in epoch]) for epoch in epochs}) == 4


class Interval(IterableDataset[int]):
    """start..end - 1; a worker reads its share where `splits` is set."""

    def __init__(self, start: int, end: int, splits: bool) -> None:
        self.start, self.end, self.splits = start, end, splits

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.splits else None
        if info is None:
            return iter(range(self.start, self.end))
        share = math.ceil((self.end - self.start) / info.num_workers)
        first = self.start + info.id * share
        return iter(range(first, min(first + share, self.end)))


def split_in_worker(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    share = math.ceil((dataset.end - dataset.start) / info.num_workers)
    dataset.start, dataset.end = (
        dataset.start + number * share,
        min(dataset.start + (number + 1) * share, dataset.end),
    )


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_iterable_data_set_splits_itself_by_worker_info(workers: int) -> None:
    ours, torchs = both(lambda c: read(c(Interval(3, 10, splits=True), num_workers=workers)))
    assert ours == torchs
    assert sorted(batch[0] for batch in ours) == list(range(3, 10))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_iterable_data_set_is_split_in_worker_init_fn(workers: int) -> None:
    ours, torchs = both(
        lambda c: read(c(Interval(3, 10, splits=False), num_workers=workers, worker_init_fn=split_in_worker))
    )
    assert ours == torchs
    assert sorted(batch[0] for batch in ours) == list(range(3, 10))


def worker_facts(index: int) -> Any:
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers, info.seed, torch.initial_seed(), index)


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}], ids=str)
def test_worker_info_in_a_row_is_torchs(asked: dict[str, Any]) -> None:
    def run(loader_class: Any) -> Any:
        torch.manual_seed(5)
        return read(loader_class(Rows(worker_facts), batch_size=2, collate_fn=list, **asked))

    ours, torchs = both(run)
    assert ours == torchs


OPENED: dict[str, list[int]] = {}


def open_reader(number: int) -> None:
    OPENED["rows"] = [1, 2, 3, 4]


class ReadsWhatWasOpened(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(OPENED["rows"])


@pytest.mark.parametrize("more", PROCESSES, ids=str)
def test_worker_init_fn_runs_before_the_data_sets_iter(more: dict[str, Any]) -> None:
    loader = DataLoader(ReadsWhatWasOpened(), num_workers=1, worker_init_fn=open_reader, **more)
    assert read(loader) == read(
        TorchDataLoader(ReadsWhatWasOpened(), num_workers=1, worker_init_fn=open_reader)
    )
    assert not OPENED  # this process was not prepared, only the worker


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}], ids=str)
def test_without_workers_worker_init_fn_is_not_called(asked: dict[str, Any]) -> None:
    def fail(number: int) -> None:
        raise AssertionError("there is no worker to prepare")

    ours, torchs = both(lambda c: read(c(range(6), batch_size=2, worker_init_fn=fail, **asked)))
    assert ours == torchs


def test_an_error_of_worker_init_fn_is_raised_by_next() -> None:
    def fail(number: int) -> None:
        raise LookupError(f"worker {number} finds no reader")

    def run(loader_class: Any) -> Any:
        with pytest.raises(LookupError, match="worker 0 finds no reader"):
            next(iter(loader_class(range(6), num_workers=1, worker_init_fn=fail)))

    both(run)


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}, {"num_workers": 1}], ids=str)
def test_rows_are_made_in_the_process_where_torch_makes_them(asked: dict[str, Any]) -> None:
    def run(loader_class: Any) -> Any:
        rows = Rows(lambda _: os.getpid())
        return {pid == os.getpid() for batch in read(loader_class(rows, **asked)) for pid in batch}

    ours, torchs = both(run)
    assert ours == torchs


@pytest.mark.parametrize("worker_type", ["auto", "thread", "process"])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (2, 1), (1, 2)])
def test_num_workers_changed_later_counts_from_the_next_pass(
    worker_type: Any, before: int, after: int
) -> None:
    def run(loader_class: Any, **more: Any) -> Any:
        loader = loader_class(Rows(worker_facts), batch_size=2, num_workers=before, collate_fn=list, **more)
        loader.num_workers = after
        torch.manual_seed(1)
        return read(loader), read(loader)

    ours = run(DataLoader, worker_type=worker_type)
    if worker_type == "thread":  # one data set for all threads, so they are no workers of torch's
        assert ours == ([[None, None]] * 10,) * 2
    else:
        assert ours == run(TorchDataLoader)


def test_num_workers_changed_between_passes() -> None:
    def run(loader_class: Any) -> Any:
        torch.manual_seed(1)
        loader = loader_class(Rows(worker_facts), batch_size=2, num_workers=2, collate_fn=list)
        passes = [read(loader)]
        for workers in (0, 1, 2):
            loader.num_workers = workers
            passes.append(read(loader))
        return passes

    ours, torchs = both(run)
    assert ours == torchs


def test_a_worker_init_fn_set_later_counts() -> None:
    # Lightning sets it on loaders that it is given.
    def run(loader_class: Any) -> Any:
        loader = loader_class(ReadsWhatWasOpened(), num_workers=1)
        loader.worker_init_fn = open_reader
        return read(loader)

    ours, torchs = both(run)
    assert ours == torchs
