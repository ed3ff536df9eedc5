"""Whatever torch's DataLoader yields, ours yields too: changing the import line of a script keeps its
batches.

Each case builds both loaders from the same arguments, after the same global seed, and compares two passes
over them.
"""

from __future__ import annotations

import collections
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from multipack.loading.loader import DataLoader


class Squares(Dataset[Any]):
    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


class ManyAtOnce(Squares):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(-index) for index in indices]


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Rows(Dataset[Any]):
    """Rows of any shape."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(index * 3) for index in range(self.length)])


class EagerSampler(Sampler[int]):
    """Draws in `__iter__` itself, as many scripts' own samplers do."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_point(i: int) -> Point:
    return Point(torch.tensor([i, i + 1]), f"p{i}")


def make_nested(i: int) -> dict[str, Any]:
    return {"a": [torch.tensor(i), {"b": (i, float(i))}], "text": str(i), "n": np.arange(3) + i}


def as_list(rows: Any) -> list[Any]:
    return ["mine", *rows]


# Arguments as a function, so that each loader has samplers and generators of its own.
CASES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "one at a time": lambda: (Squares(), {}),
    "batches, the last one short": lambda: (Squares(), {"batch_size": 5}),
    "drop_last": lambda: (Squares(), {"batch_size": 5, "drop_last": True}),
    "batch_size above the length": lambda: (Squares(3), {"batch_size": 5}),
    "an empty data set": lambda: (Squares(0), {"batch_size": 5}),
    "batch_size=None": lambda: (Squares(), {"batch_size": None}),
    "batch_size=None with a sampler of lists": lambda: (
        TensorDataset(torch.arange(23)),
        {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(23)), 4, False)},
    ),
    "shuffle by the global seed": lambda: (Squares(), {"batch_size": 4, "shuffle": True}),
    "shuffle by a generator": lambda: (
        Squares(),
        {"batch_size": 4, "shuffle": True, "generator": generator()},
    ),
    "shuffle, batch_size=None": lambda: (Squares(), {"batch_size": None, "shuffle": True}),
    "shuffle, drop_last": lambda: (Squares(), {"batch_size": 4, "shuffle": True, "drop_last": True}),
    "a sampler": lambda: (Squares(), {"batch_size": 4, "sampler": SequentialSampler(range(7))}),
    "a sampler that is a list": lambda: (Squares(), {"batch_size": 2, "sampler": [4, 3, 2, 2, 9]}),
    "with replacement": lambda: (
        Squares(),
        {"batch_size": 4, "sampler": RandomSampler(range(23), replacement=True, num_samples=70)},
    ),
    "more samples than rows": lambda: (
        Squares(),
        {"batch_size": 4, "sampler": RandomSampler(range(23), num_samples=60)},
    ),
    "SubsetRandomSampler": lambda: (
        Squares(),
        {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, 19))},
    ),
    "WeightedRandomSampler": lambda: (
        Squares(),
        {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 23, 30)},
    ),
    "DistributedSampler": lambda: (
        Squares(),
        {"batch_size": 4, "sampler": DistributedSampler(range(23), num_replicas=3, rank=1, seed=2)},
    ),
    "a sampler that draws in __iter__": lambda: (Squares(), {"batch_size": 4, "sampler": EagerSampler()}),
    "a batch sampler": lambda: (
        Squares(),
        {"batch_sampler": BatchSampler(RandomSampler(range(23)), 6, False)},
    ),
    "a batch sampler that is a list": lambda: (Squares(), {"batch_sampler": [[1, 2], [3], [5, 8, 13]]}),
    "__getitems__": lambda: (ManyAtOnce(), {"batch_size": 4}),
    "a collate function": lambda: (Squares(), {"batch_size": 4, "collate_fn": as_list}),
    "a collate function, batch_size=None": lambda: (
        Rows(lambda i: [i, i]),
        {"batch_size": None, "collate_fn": as_list},
    ),
    "named tuples": lambda: (Rows(make_point), {"batch_size": 3}),
    "nested containers": lambda: (Rows(make_nested), {"batch_size": 3}),
    "strings": lambda: (Rows(str), {"batch_size": 3}),
    "numpy rows, batch_size=None": lambda: (Rows(lambda i: np.full(2, i)), {"batch_size": None}),
    "tuples of tensors": lambda: (TensorDataset(torch.arange(11), torch.arange(11.0)), {"batch_size": 3}),
    "an iterable data set": lambda: (Stream(), {"batch_size": 5}),
    "an iterable data set, drop_last": lambda: (Stream(), {"batch_size": 5, "drop_last": True}),
    "an iterable data set, batch_size=None": lambda: (Stream(), {"batch_size": None}),
    "an empty iterable data set": lambda: (Stream(0), {"batch_size": 5}),
    "an iterable data pipe": lambda: (
        IterableWrapper(range(23)).shuffle(),
        {"batch_size": 5, "shuffle": True},
    ),
    "a data pipe with ids": lambda: (SequenceWrapper(range(23)), {"batch_size": 5, "shuffle": True}),
    "an iterable data set, a collate function": lambda: (Stream(), {"batch_size": 5, "collate_fn": as_list}),
}


def two_passes(loader_class: Any, case: str, **more: Any) -> list[Any]:
    dataset, arguments = CASES[case]()
    torch.manual_seed(11)
    loader = loader_class(dataset, **arguments, **more)
    batches: list[Any] = []
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        batches.append(list(loader))
        batches.append(torch.rand(1))  # the global random state must be where torch leaves it
    return batches


def same(ours: Any, theirs: Any) -> bool:
    """Equal in type, shape, dtype and every value."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


@pytest.mark.parametrize("case", CASES)
def test_default_script_keeps_its_batches(case: str) -> None:
    # torch's default is num_workers=0, ours is one thread.
    assert same(two_passes(DataLoader, case), two_passes(TorchDataLoader, case))


@pytest.mark.parametrize(
    "more",
    [
        {"num_workers": 0},
        {"num_workers": 3, "worker_type": "thread"},
        {"num_workers": 2, "prefetch_factor": 1, "worker_type": "thread"},
    ],
)
@pytest.mark.parametrize("case", [case for case in CASES if case != "a sampler that draws in __iter__"])
@pytest.mark.report("google/grain#1129")
def test_any_number_of_threads_keeps_the_batches(case: str, more: dict[str, int]) -> None:
    assert same(two_passes(DataLoader, case, **more), two_passes(TorchDataLoader, case))


@pytest.mark.parametrize(
    "case", ["shuffle by the global seed", "a sampler that draws in __iter__", "with replacement"]
)
@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_script_with_workers_keeps_its_batches(case: str, worker_type: str) -> None:
    ours = two_passes(DataLoader, case, num_workers=2, worker_type=worker_type)
    assert same(ours, two_passes(TorchDataLoader, case, num_workers=2))


@pytest.mark.parametrize("case", ["drop_last", "nested containers", "a batch sampler that is a list"])
def test_processes_keep_the_batches(case: str) -> None:
    ours = two_passes(DataLoader, case, num_workers=2, worker_type="process")
    assert same(ours, two_passes(TorchDataLoader, case, num_workers=2))


def test_zipped_loaders_draw_in_torchs_order() -> None:
    def orders(loader_class: Any, **more: Any) -> list[Any]:
        torch.manual_seed(3)
        loaders = [loader_class(Squares(), batch_size=4, shuffle=True, **more) for _ in range(2)]
        return list(zip(*loaders, strict=True))

    assert same(orders(DataLoader), orders(TorchDataLoader))
    assert same(orders(DataLoader, num_workers=1), orders(TorchDataLoader, num_workers=1))


@pytest.mark.parametrize(
    "case", ["batches, the last one short", "drop_last", "batch_size=None", "a batch sampler", "a sampler"]
)
def test_len_is_torchs(case: str) -> None:
    dataset, arguments = CASES[case]()
    assert len(DataLoader(dataset, **arguments)) == len(TorchDataLoader(dataset, **arguments))


def test_len_of_an_iterable_data_set_is_the_data_sets_word() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return 20

    loader = DataLoader(Sized(), batch_size=5)
    assert len(loader) == 4
    with pytest.warns(
        UserWarning, match="Length of IterableDataset"
    ):  # 23 rows make 5 batches; torch compares with 20
        list(DataLoaderWithLen(Sized()))
    with pytest.raises(TypeError):
        len(DataLoader(Stream(), batch_size=5))


class DataLoaderWithLen(DataLoader[Any]):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=None)
        len(self)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"num_workers": 0, "prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"num_workers": 0, "persistent_workers": True},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 8},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_size": None, "drop_last": True},
    ],
)
def test_what_torch_refuses_is_refused(arguments: dict[str, Any]) -> None:
    for loader_class in (TorchDataLoader, DataLoader):
        with pytest.raises(ValueError):
            loader_class(Squares(), **arguments)


@pytest.mark.parametrize("arguments", [{"sampler": [1]}, {"batch_sampler": [[1]]}, {"shuffle": True}])
def test_iterable_data_sets_take_no_sampler(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="IterableDataset"):
        DataLoader(Stream(), **arguments)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attributes_are_fixed_after_construction(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        setattr(DataLoader(Squares()), name, None)


def test_it_is_a_torch_loader_with_torchs_attributes() -> None:
    loader = DataLoader(Squares(), batch_size=4, drop_last=True, num_workers=2, generator=generator())
    torchs = TorchDataLoader(Squares(), batch_size=4, drop_last=True, num_workers=2, generator=generator())
    assert isinstance(loader, TorchDataLoader)
    for name in (
        "batch_size",
        "drop_last",
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "timeout",
        "in_order",
    ):
        assert getattr(loader, name) == getattr(torchs, name)
    assert (
        DataLoader(Squares(), num_workers=0).prefetch_factor is None
    )  # frameworks hand it on, and torch takes only None


def test_worker_init_fn_in_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="worker_type='process'"):
        DataLoader(Squares(), num_workers=3, worker_type="thread", worker_init_fn=mark_worker)


def test_get_worker_info_in_a_thread_is_none() -> None:
    seen = Rows(
        lambda i: (threading.current_thread() is threading.main_thread(), torch.utils.data.get_worker_info())
    )
    loader = DataLoader(seen, batch_size=None, num_workers=2, worker_type="thread")
    assert {tuple(row) for row in loader} == {(False, None)}


def test_worker_init_fn_runs_in_each_process() -> None:
    loader = DataLoader(
        Rows(lambda i: torch.utils.data.get_worker_info().seed_by_test),
        batch_size=None,
        num_workers=2,
        worker_type="process",
        worker_init_fn=mark_worker,
    )
    assert sorted(set(loader)) == [100, 101]


def mark_worker(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    object.__setattr__(info, "seed_by_test", 100 + number) if not hasattr(
        type(info), "__slots__"
    ) else setattr(type(info), "seed_by_test", 100 + number)


def test_errors_keep_their_type_and_name_the_place() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 9:
                raise KeyError("row nine")
            return super().__getitem__(index)

    for more in (
        {"num_workers": 0},
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 1, "worker_type": "process"},
    ):
        iterator = iter(DataLoader(Broken(), batch_size=4, **more))  # type: ignore[arg-type]
        assert [len(next(iterator)) for _ in range(2)] == [4, 4]
        with pytest.raises(KeyError, match="row nine"):
            next(iterator)


def test_stop_iteration_in_a_row_is_an_error_that_names_it() -> None:
    # torch with num_workers=0 takes it for the end and yields 4 of 10 batches (pytorch#44527).
    class Broken(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            return next(iter(())) if index == 4 else super().__getitem__(index)

    for workers in (0, 1, 2):
        iterator = iter(DataLoader(Broken(10), num_workers=workers, worker_type="thread"))
        assert [int(next(iterator)) for _ in range(4)] == [0, 1, 4, 9]
        with pytest.raises(RuntimeError, match=r"\[4\].*StopIteration"):
            next(iterator)


def test_a_slow_row_times_out_with_its_stack() -> None:
    release = threading.Event()

    class Slow(Squares):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 2:
                release.wait()
            return super().__getitem__(index)

    iterator = iter(DataLoader(Slow(), timeout=0.1, num_workers=1, worker_type="thread"))
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match=r"release\.wait"):
        next(iterator)
    release.set()


def test_pin_memory_without_an_accelerator_warns_and_changes_nothing() -> None:
    loader = DataLoader(Squares(), batch_size=4, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator"):
        batches = list(loader)
    assert same(batches, list(TorchDataLoader(Squares(), batch_size=4)))


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_persistent_workers_serve_pass_after_pass_also_after_a_break(worker_type: str) -> None:
    loader = DataLoader(
        Squares(40), batch_size=4, num_workers=2, persistent_workers=True, worker_type=worker_type
    )
    expected = list(TorchDataLoader(Squares(40), batch_size=4))
    for stop_at in (1, 3, 10):
        for number, batch in enumerate(loader):
            assert torch.equal(batch, expected[number])
            if number + 1 == stop_at:
                break
    assert same(list(loader), expected)
    first = iter(loader)
    next(first)
    assert same(list(loader), expected)  # while an unfinished pass is still held


def test_it_pickles_also_while_it_is_iterated() -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, generator=generator())
    iterator = iter(loader)
    next(iterator)
    assert same(list(pickle.loads(pickle.dumps(loader))), list(TorchDataLoader(Squares(), batch_size=4)))


@pytest.mark.report("pytorch/pytorch#5059")
def test_random_numbers_of_numpy_do_not_repeat_between_threads_or_epochs() -> None:
    # pytorch#5059: worker processes used to repeat each other's numbers.
    loader = DataLoader(
        Rows(lambda _: np.random.randint(2**31)), batch_size=None, num_workers=4, worker_type="thread"
    )
    assert len({int(value) for _ in range(2) for value in loader}) == 22


def test_counter_of_a_foreign_mapping_survives() -> None:
    loader = DataLoader(Rows(lambda i: collections.Counter(a=i)), batch_size=2, collate_fn=as_list)
    assert next(iter(loader)) == ["mine", collections.Counter(a=0), collections.Counter(a=1)]
