"""Passes over a loader: how they begin, what they hold, how they end."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import (
    Dataset,
)

from multipack import EpochPlan, MultipackBatchSampler, pack
from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.loading.prefetch import Prefetcher
from multipack.order.packing import MethodName


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


METHODS: tuple[MethodName, ...] = ("auto", "stream", "best_fit_decreasing", "next_fit")


def rows_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of these lengths; token k of all is k + 1, so that a token says where it came from."""
    return np.arange(1, sum(lengths) + 1, dtype=np.int32), np.concatenate(([0], np.cumsum(lengths)))


SOURCE = (np.arange(300, dtype=np.int32), np.arange(0, 301, 3))


class Items(Dataset[int]):
    """Numbers; `on_read` is called with each before it is returned."""

    def __init__(self, length: int, on_read: Callable[[int], Any] = lambda _: None) -> None:
        self.length, self.on_read, self.reads = length, on_read, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.on_read(index)
        return index


def stop_at_4(index: int) -> None:
    if index == 4:
        raise StopIteration


def stops_over_4(numbers: list[int]) -> list[int]:
    stop_at_4(max(numbers))
    return numbers


class Stopping:
    """A sampler of ten rows that goes wrong at the fifth."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        for index in range(10):
            stop_at_4(index)
            yield index


class Memory(Dataset[Any]):
    """A million rows; a batch says who read it, how many rows it has, and, every tenth time, what that
    process holds for itself."""

    calls = 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, ids: list[int]) -> tuple[int, int, int]:
        self.calls += 1
        process = psutil.Process()
        return process.pid, len(ids), process.memory_full_info().uss if self.calls % 10 == 1 else 0


def as_it_is(answer: Any) -> Any:
    return answer


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 8), ("shuffle", True), ("sampler", [0, 1]), ("drop_last", True)]
)
@pytest.mark.report("catalyst-team/catalyst#271")
def test_a_plan_and_a_batch_size_contradict_each_other(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_sampler.*{option}"):
        DataLoader(Numbers(64), batch_sampler=MultipackBatchSampler([1] * 64, 2), **{option: value})
    loader = packed_dataloader((np.zeros(64, np.int32), np.arange(65)), 2, rank=0, num_replicas=1)
    assert len(list(loader)) == 32


@pytest.mark.report("axolotl-ai-cloud/axolotl#3848")
def test_a_dropped_short_batch_leaves_the_slot_count() -> None:
    """No batch at all is an error at construction here, where the report accepts an empty loader that says
    so."""
    loader = DataLoader(
        TokenDataset(rows_of([6, 6, 6])),
        batch_sampler=MultipackBatchSampler([6, 6, 6], 10, bins_per_batch=2, drop_last=True),
        collate_fn=PackedCollator(),
    )
    assert len(loader) == len(list(loader)) == 1
    assert (loader.stats.bin_slots, loader.stats.tokens, loader.stats.efficiency) == (20, 12, 0.6)
    with pytest.raises(ValueError, match="1 bins do not fill one batch of bins_per_batch=2"):
        MultipackBatchSampler([6], 10, bins_per_batch=2, drop_last=True)
    with pytest.raises(ValueError, match="no sequences to pack"):
        MultipackBatchSampler([], 10, bins_per_batch=2, drop_last=True)
    for method in METHODS:
        assert (len(pack([], 10, method=method)), pack([], 10, method=method).efficiency) == (0, 0.0)
    assert (len(EpochPlan([], 10)), EpochPlan([], 10).efficiency, EpochPlan([], 10).bins(0, 5)) == (
        0,
        0.0,
        [],
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.report("hiyouga/LlamaFactory#4188")
def test_a_few_short_rows_still_make_a_bin(method: MethodName) -> None:
    loader = packed_dataloader(rows_of([3, 2]), 8, method=method, pad_to="capacity", rank=0, num_replicas=1)
    (batch,) = loader
    assert (batch["num_sequences"], batch["num_tokens"], batch["input_ids"].numel()) == (2, 5, 8)
    assert (loader.stats.slots - loader.stats.tokens) == 3


@pytest.mark.report("pytorch/torchtitan#1626")
def test_exhaustion_inside_a_generator_is_plain() -> None:
    loader = packed_dataloader(SOURCE, 6, rank=0, num_replicas=1)

    def wrapper() -> Iterator[Any]:
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return

    assert len(list(wrapper())) == 50
    iterator = iter(loader)
    for _ in range(50):
        next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration) as caught:
            next(iterator)
        assert type(caught.value) is StopIteration


@pytest.mark.parametrize(
    "way",
    [
        {"num_workers": 0},
        {"num_workers": 1, "worker_type": "thread"},
        {"num_workers": 3, "worker_type": "thread"},
        {"num_workers": 2, "worker_type": "process"},
    ],
)
@pytest.mark.parametrize("where", ["row", "collator", "sampler"])
@pytest.mark.report("pytorch/pytorch#44527")
def test_stop_iteration_of_the_users_code_is_no_end(where: str, way: dict[str, Any]) -> None:
    loaders: dict[str, Any] = {
        "row": lambda: DataLoader(Items(10, on_read=stop_at_4), batch_size=None, **way),
        "collator": lambda: DataLoader(Items(10), batch_size=1, collate_fn=stops_over_4, **way),
        "sampler": lambda: DataLoader(Items(10), batch_size=None, sampler=Stopping(), **way),
    }
    got = []
    told = "generator raised StopIteration" if where == "sampler" else "item 4 .*raised StopIteration"
    with pytest.raises(RuntimeError, match=told):
        got.extend(batch for batch in loaders[where]())
    # Worker processes ask the sampler for ids ahead of the batches, so its error may come before them.
    assert got == {"row": [0, 1, 2, 3], "collator": [[0], [1], [2], [3]], "sampler": got}[where]


@pytest.mark.report("mosaicml/streaming#383")
def test_a_prefetch_of_zero_is_synchronous() -> None:
    threads: set[str] = set()
    items = Items(10, on_read=lambda _: threads.add(threading.current_thread().name))
    assert list(DataLoader(items, batch_size=None, prefetch_batches=0)) == list(range(10))
    assert threads == {threading.main_thread().name}
    assert list(Prefetcher(range(10), depth=0)) == list(range(10))
    with pytest.raises(ValueError, match="depth=-1"):
        Prefetcher(range(10), depth=-1)


@pytest.mark.report("karpathy/nanochat#371")
def test_a_small_data_set_ends_or_begins_anew_and_never_waits() -> None:
    """A pass ends; going round is one more `iter`, here by `itertools`."""
    thread: Any = {"num_workers": 1, "worker_type": "thread"}
    loader = DataLoader(Items(6), batch_size=None, prefetch_batches=4, **thread)
    assert list(loader) == [0, 1, 2, 3, 4, 5]
    rounds = itertools.chain.from_iterable(itertools.repeat(loader))
    assert list(itertools.islice(rounds, 10)) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    packed = packed_dataloader(SOURCE, 6, rank=0, num_replicas=1)
    endless = itertools.chain.from_iterable(itertools.repeat(packed))
    starts = [int(batch["input_ids"][0, 0]) for batch in itertools.islice(endless, 125)]
    assert packed.batch_sampler.epoch == 2  # type: ignore[union-attr]
    assert len(starts) == 125


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.report("pytorch/pytorch#20433")
def test_a_plan_is_a_few_flat_arrays() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 1_000_000).astype(np.uint16)
    plan = EpochPlan(lengths, 4096)
    plan.bins(0, len(plan))
    kept = sum(array.nbytes for window in plan._cache.values() for array in (window.offsets, window.rows))
    assert 8e6 <= kept <= 16e6
    assert len(pickle.dumps(plan)) < 20e6
    loader = DataLoader(
        Memory(),
        batch_sampler=MultipackBatchSampler(lengths, 4096),
        collate_fn=as_it_is,
        num_workers=4,
        worker_type="process",
    )
    answers = list(loader)
    assert sum(rows for _, rows, _ in answers) == 1_000_000
    for worker in {pid for pid, _, _ in answers}:
        held = [uss for pid, _, uss in answers if pid == worker and uss]
        assert len(held) > 20
        assert max(held) - held[0] < 50e6


@pytest.mark.parametrize(
    "way", [{"num_workers": 0}, *({"num_workers": 2, "worker_type": kind} for kind in ("thread", "process"))]
)
@pytest.mark.report("OpenRLHF/OpenRLHF#1355")
def test_the_ambient_random_state_has_no_say(way: dict[str, Any]) -> None:
    orders = set()
    for drawn in (0, 1, 5):
        torch.rand(drawn)
        np.random.random(drawn)
        sampler = MultipackBatchSampler([1] * 50, 5, seed=42)
        loader = DataLoader(Numbers(50), batch_sampler=sampler, **way)
        orders.add(tuple(torch.cat(list(loader)).tolist()))
    plain = [row for batch in MultipackBatchSampler([1] * 50, 5, seed=42) for row in batch]
    assert orders == {tuple(plain)}
