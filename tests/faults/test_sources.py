"""Sources that fail, hang or end in the middle: batches before the fault arrive, the fault is named, and
after a repair the rest comes once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from multipack import MultipackBatchSampler
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader

COUNT = 60


class Faulty(Dataset[int]):
    """Row i is i; reading the `place`-th row of a pass calls `fault`."""

    def __init__(self, place: int, fault: Any) -> None:
        self.place, self.fault, self.reads = place, fault, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        if self.reads == self.place:
            self.fault()
        return index


def fail(error: type[BaseException]) -> Any:
    def raise_it() -> None:
        raise error  # a new one each time: its traceback holds the pass that met it

    return raise_it


def as_list(rows: Any) -> list[int]:
    return list(rows)


def loader(dataset: Any, **way: Any) -> DataLoader[Any]:
    sampler = MultipackBatchSampler([1] * COUNT, 3)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=as_list, worker_type="thread", **way)


@settings(max_examples=25)
@given(
    place=st.integers(1, COUNT),
    error=st.sampled_from([OSError, ValueError, MemoryError, SystemExit, KeyboardInterrupt]),
    way=st.sampled_from([{"num_workers": 0}, {"num_workers": 1, "prefetch_batches": 5}, {"num_workers": 3}]),
)
def test_a_row_that_raises_stops_exactly_there_and_the_rest_comes_after_a_repair(
    place: int, error: type[BaseException], way: dict[str, Any]
) -> None:
    whole = list(loader(Faulty(0, None), num_workers=0))
    # With one reader the place-th read is in batch (place - 1) // 3; with more readers it is in that one or a
    # near one.
    broken = loader(Faulty(place, fail(error)), **way)
    before: list[list[int]] = []
    with pytest.raises(error):
        before.extend(broken)
    assert before == whole[: len(before)]
    if way["num_workers"] < 2:
        assert len(before) == (place - 1) // 3
    repaired = loader(Faulty(0, None), **way)
    repaired.load_state_dict(broken.state_dict())
    assert before + list(repaired) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_hangs_is_named_with_its_stack_and_the_rest_comes_after_a_repair(workers: int) -> None:
    whole = list(loader(Faulty(0, None), num_workers=0))
    slow = loader(Faulty(31, lambda: time.sleep(1.0)), num_workers=workers, timeout=0.3)
    before: list[list[int]] = []
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Item \d+ did not come for 0.3 s(?s:.)*in __getitem__"):
        before.extend(slow)
    assert time.monotonic() - started < 0.9
    assert before == whole[: len(before)]
    repaired = loader(Faulty(0, None), num_workers=workers)
    repaired.load_state_dict(slow.state_dict())
    assert before + list(repaired) == whole


def test_a_slow_source_slows_and_changes_nothing() -> None:
    class Slow(Faulty):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.002 * (index % 4))
            return index

    whole = list(loader(Faulty(0, None), num_workers=0))
    slow = loader(Slow(0, None), num_workers=3)
    assert list(slow) == whole
    assert slow.stats.wait_share > 0.5


def test_a_data_set_shorter_than_its_lengths_is_an_error_that_names_both_or_the_row() -> None:
    short = TokenDataset((np.zeros(10, np.int32), np.arange(0, 11, 2)))
    sampler = MultipackBatchSampler([2] * 6, 4, shuffle=False)
    with pytest.raises(ValueError, match=r"the data set has 5 rows, but .* from the lengths of 6"):
        DataLoader(short, batch_sampler=sampler, collate_fn=list)
    with pytest.raises(IndexError, match=r"sequence 5 is outside 0\.\.4"):
        list(TorchDataLoader(short, batch_sampler=sampler, collate_fn=list))
