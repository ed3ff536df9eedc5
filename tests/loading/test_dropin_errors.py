"""An error of a row ends that `next()` only; the pass goes on as torch's does.

Each pass is read to its end by a loop that skips what fails, once with torch's loader and once with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dropin_cases import Rows, both, outcomes
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from multipack import DataLoader

BAD = {3, 8, 9, 19}
WAYS: list[dict[str, Any]] = [
    {},
    *({"num_workers": n, "worker_type": kind} for n in (0, 1, 2) for kind in ("auto", "thread", "process")),
]


def fails_on_bad(index: int) -> int:
    if index in BAD:
        raise ValueError(f"row {index} is corrupt")
    return index


def collate_fails(rows: list[int]) -> torch.Tensor:
    return torch.tensor([fails_on_bad(row) for row in rows])


class HalfBroken(IterableDataset[int]):
    """Its iterator raises for a bad row and goes on behind it."""

    def __iter__(self) -> Iterator[int]:
        return map(fails_on_bad, range(20))


class Generator(IterableDataset[int]):
    """A generator, which is over once it has raised."""

    def __iter__(self) -> Iterator[int]:
        for index in range(20):
            yield fails_on_bad(index)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class FailingSampler:
    """Raises instead of its sixth id."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return map(fails_on_bad, [0, 1, 2, 4, 5, 3, 6, 7])


SCRIPTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "rows": lambda: (Rows(fails_on_bad), {"batch_size": 2}),
    "rows one by one": lambda: (Rows(fails_on_bad), {"batch_size": None}),
    "rows, the last batch is bad": lambda: (Rows(fails_on_bad), {"batch_size": 7}),
    "every batch": lambda: (Rows(fails_on_bad, 4), {"batch_size": 1, "sampler": [3, 3, 3]}),
    "a collator": lambda: (Rows(int), {"batch_size": 2, "collate_fn": collate_fails}),
    "a stream": lambda: (HalfBroken(), {"batch_size": 2}),
    "a stream one by one": lambda: (HalfBroken(), {"batch_size": None}),
    "a stream from a generator": lambda: (Generator(), {"batch_size": 2}),
    "a collator over a stream": lambda: (
        Numbers(),
        {"batch_size": 2, "collate_fn": collate_fails},
    ),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loop_that_skips_what_fails_sees_torchs_batches(script: str, way: dict[str, Any]) -> None:
    def run(loader_class: Any, **more: Any) -> list[Any]:
        dataset, arguments = SCRIPTS[script]()
        return outcomes(iter(loader_class(dataset, **arguments, **more)))

    workers = way.get("num_workers", 0)
    if way.get("worker_type") == "thread":
        workers = min(
            workers, 0 if "stream" in script else 9
        )  # threads read one stream, so each row comes once
    torchs = run(TorchDataLoader, num_workers=workers)
    assert run(DataLoader, **way) == torchs
    assert "ValueError" in torchs


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_skipping_two_bad_rows_loses_only_their_batches(way: dict[str, Any]) -> None:
    # Rows 3, 8, 9 and 19 of 20 are bad: batches 1, 4 and 9 of ten fail.
    seen = outcomes(iter(DataLoader(Rows(fails_on_bad), batch_size=2, **way)))
    assert seen == [
        "ValueError" if number in (1, 4, 9) else [2 * number, 2 * number + 1] for number in range(10)
    ]


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}], ids=str)
def test_a_sampler_that_raises_ends_the_pass_as_torchs(asked: dict[str, Any]) -> None:
    ours, torchs = both(
        lambda c: outcomes(iter(c(range(20), batch_size=2, sampler=FailingSampler(), **asked)))
    )
    assert ours == torchs == [[0, 1], [2, 4], "ValueError"]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_next_pass_after_errors_is_whole(way: dict[str, Any]) -> None:
    loader = DataLoader(Rows(fails_on_bad), batch_size=2, **way)
    assert outcomes(iter(loader)) == outcomes(iter(loader))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_state_saved_behind_a_bad_batch_resumes_behind_it(way: dict[str, Any]) -> None:
    loader = DataLoader(Rows(fails_on_bad), batch_size=2, **way)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(ValueError, match="row 3"):
        next(iterator)
    assert next(iterator).tolist() == [4, 5]
    state = loader.state_dict()
    rest = outcomes(iterator)
    resumed = DataLoader(Rows(fails_on_bad), batch_size=2, **way)
    resumed.load_state_dict(state)
    assert outcomes(iter(resumed)) == rest


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_row_reaches_the_caller(error: type[BaseException]) -> None:
    def interrupted(index: int) -> int:
        if index == 1:
            raise error()
        return index

    for way in ({}, {"num_workers": 1, "worker_type": "thread"}):
        iterator = iter(DataLoader(Rows(interrupted), batch_size=None, **way))  # type: ignore[arg-type]  # a dict
        assert next(iterator) == 0
        with pytest.raises(error):
            next(iterator)
