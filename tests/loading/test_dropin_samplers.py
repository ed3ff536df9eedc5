"""Samplers that scripts replace, wrap or nest: our loader asks the ones it holds when a pass begins, as
torch's does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from dropin_cases import both, plain, read
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler

from multipack import DataLoader

WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 0},
    *({"num_workers": n, "worker_type": kind} for n in (1, 2) for kind in ("auto", "thread", "process")),
]


@pytest.fixture(autouse=True)
def _hangs_fail() -> Iterator[None]:
    """A constructor that never returns is a failure, not a test that never ends."""

    def fail(*_: object) -> None:
        raise TimeoutError("still running after 60 s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


class Repeat:
    """Gives the batches of its sampler over and over."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def endless_of_yolo(base: Any) -> Any:
    """As YOLO's loader: `batch_sampler` is replaced behind torch's check, and one endless iterator serves all
    epochs."""

    class Endless(base):  # type: ignore[misc]  # base is a variable
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return Endless


def endless_of_timm(base: Any) -> Any:
    """As timm's loader: torch's mark of a finished constructor is taken away while `batch_sampler` is
    replaced."""

    class Endless(base):  # type: ignore[misc]  # base is a variable
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = Repeat(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return Endless


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("pattern", [endless_of_yolo, endless_of_timm])
def test_endless_subclasses_serve_epoch_after_epoch(pattern: Any, way: dict[str, Any]) -> None:
    asked = {"num_workers": way["num_workers"]} if "num_workers" in way else {}
    torchs = pattern(TorchDataLoader)(range(6), batch_size=2, **asked)
    ours = pattern(DataLoader)(range(6), batch_size=2, **way)
    for _ in range(3):
        assert read(ours) == read(torchs) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_sampler_replaced_between_passes_counts_from_the_next_one(way: dict[str, Any]) -> None:
    loader = DataLoader(range(6), batch_size=2, **way)
    assert read(loader) == [[0, 1], [2, 3], [4, 5]]
    object.__setattr__(loader, "batch_sampler", [[5], [4, 3]])
    assert read(loader) == [[5], [4, 3]]
    assert len(loader) == 2


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_ids_inside_a_batch_sampler_may_be_replaced(way: dict[str, Any]) -> None:
    # accelerate puts its seeded sampler into a loader in this way.
    loader = DataLoader(range(6), batch_size=2, **way)
    loader.batch_sampler.sampler = [3, 2, 1]
    assert read(loader) == [[3, 2], [1]]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_sampler_of_single_ids_may_be_replaced(way: dict[str, Any]) -> None:
    loader = DataLoader(range(6), batch_size=None, **way)
    object.__setattr__(loader, "sampler", [4, 4, 1])
    assert read(loader) == [4, 4, 1]


def test_a_replaced_sampler_is_the_one_that_a_state_speaks_of() -> None:
    loader = DataLoader(range(20), batch_size=2)
    object.__setattr__(loader, "batch_sampler", [[n, n] for n in range(9)])
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(4)] == [[n, n] for n in range(4)]
    state = loader.state_dict()
    resumed = DataLoader(range(20), batch_size=2)
    object.__setattr__(resumed, "batch_sampler", [[n, n] for n in range(9)])
    resumed.load_state_dict(state)
    assert read(resumed) == [[n, n] for n in range(4, 9)]


def test_a_collate_function_replaced_later_counts() -> None:
    def run(loader_class: Any) -> Any:
        loader = loader_class(range(6), batch_size=3)
        loader.collate_fn = sum
        return read(loader)

    ours, torchs = both(run)
    assert ours == torchs == [3, 12]


class Own:
    """A batch sampler whose `sampler` is itself, as frameworks that look for one want it."""

    def __init__(self) -> None:
        self.sampler, self.batch_size, self.drop_last = self, 2, False

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


class Circle(Own):
    """Two samplers that name each other."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Own()
        self.sampler.sampler = self


@pytest.mark.parametrize("sampler", [Own, Circle])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_sampler_that_names_itself_is_read_like_any_other(sampler: Any, way: dict[str, Any]) -> None:
    loader = DataLoader(range(4), batch_sampler=sampler(), **way)
    assert len(loader) == 2
    loader.set_epoch(1)
    assert read(loader) == [[0, 1], [2, 3]]
    iterator = iter(loader)
    next(iterator)
    resumed = DataLoader(range(4), batch_sampler=sampler(), **way)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed) == [[2, 3]]


def test_a_mock_as_sampler_fails_where_torch_fails() -> None:
    def run(loader_class: Any) -> str:
        loader = loader_class(range(4), sampler=Mock())
        with pytest.raises(TypeError, match="Mock"):
            next(iter(loader))
        return "built"

    ours, torchs = both(run)
    assert ours == torchs


def test_a_mock_that_iterates_is_read() -> None:
    sampler = Mock(spec=SequentialSampler)
    sampler.__iter__ = Mock(side_effect=lambda: iter([2, 0]))
    ours, torchs = both(lambda c: read(c(range(4), sampler=sampler)))
    assert ours == torchs == [[2], [0]]


def test_a_generator_given_to_a_sampler_later_counts() -> None:
    # accelerate seeds the sampler of a loader that it was given.
    import torch

    def run(loader_class: Any) -> Any:
        sampler = RandomSampler(range(12))
        loader = loader_class(range(12), batch_size=3, sampler=sampler)
        sampler.generator = torch.Generator().manual_seed(7)
        return read(loader), read(loader)

    ours, torchs = both(run)
    assert ours == torchs


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_passes_over_one_loader_may_be_open_at_once(way: dict[str, Any]) -> None:
    # Lightning's CombinedLoader may hold the same loader twice.
    loader = DataLoader(range(8), batch_size=2, **way)
    pairs = [(plain(a), plain(b)) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([n, n + 1], [n, n + 1]) for n in range(0, 8, 2)]
