"""One batch of 65,536 tokens from a data set on disk: ours, what users have today, and a plain copy of the
same bytes.

    taskset -c 1 python -m pytest benchmarks/test_collate_speed.py --benchmark-timer=time.thread_time

The time is that of the thread that makes the batch, so that other load does not count. Every collator gives
the batch of trl before it is timed. Batches are of random rows; the data set (556 MB) is in the page cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.probes import copy
from benchmarks.record import record
from benchmarks.rivals import (
    Collate,
    flattening_collate,
    numpy_collate,
    trl_collate,
    trl_collator,
)
from benchmarks.timing import over
from benchmarks.workloads import CAPACITY, saved_dataset
from multipack import PackedCollator, TokenDataset, pack

Bins = list[list[int]]
ROUNDS = 10
pytestmark = [
    pytest.mark.benchmark(group=f"collate a batch of {CAPACITY} tokens"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),  # trl's, on torch rows
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    datasets.disable_progress_bars()
    return saved_dataset(tmp_path_factory.mktemp("collate"))


@pytest.fixture(scope="module")
def bins(source: datasets.Dataset) -> Bins:
    lengths = TokenDataset(source).lengths
    order = np.random.default_rng(0).permutation(len(lengths))
    packing = pack(lengths[order], CAPACITY)
    return [order[packing[b]].tolist() for b in range(len(packing))]


def ours(source: datasets.Dataset) -> Collate:
    dataset, collator = TokenDataset(source), PackedCollator()
    return lambda ids: collator(dataset.__getitems__(ids))


def ours_from_rows(source: datasets.Dataset) -> Collate:
    collator = PackedCollator()
    return lambda ids: collator(source.__getitems__(ids))


def torch_rows(source: datasets.Dataset) -> Collate:
    return trl_collate(source.with_format("torch"))


COLLATORS = {
    "multipack": ours,
    "multipack, rows as dicts": ours_from_rows,
    "numpy slices": numpy_collate,
    "trl, torch rows": torch_rows,
    "transformers flattening": flattening_collate,
    "trl": trl_collate,
}


def assert_same_batches(collate: Collate, expected: Collate, bins: Bins) -> None:
    for ids in bins[:3]:
        batch = collate(ids)
        for name, value in expected(ids).items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == batch[name].dtype
                assert torch.equal(value, batch[name]), name
            else:
                assert value == batch[name], name


def batch_bytes(collate: Collate, ids: list[int]) -> int:
    """Bytes of all tensors we write."""
    tensors = {id(value): value for value in collate(ids).values() if isinstance(value, torch.Tensor)}
    return sum(value.nbytes for value in tensors.values())


@pytest.mark.parametrize("name", COLLATORS)
def test_collate(benchmark: Any, source: datasets.Dataset, bins: Bins, name: str) -> None:
    collate = COLLATORS[name](source)
    assert_same_batches(collate, trl_collate(source), bins)
    batches = itertools.cycle(bins)
    rounds = 1000 if name in ("multipack", "numpy slices") else 50
    benchmark.pedantic(
        lambda ids: collate(ids), setup=lambda: ((next(batches),), {}), rounds=rounds, warmup_rounds=20
    )


def test_copy(benchmark: Any, source: datasets.Dataset, bins: Bins) -> None:
    num_bytes = batch_bytes(ours(source), bins[0])
    benchmark.extra_info["bytes"] = num_bytes
    benchmark.pedantic(copy(num_bytes), rounds=1000, warmup_rounds=20)


def test_loaders_beside_a_copy(source: datasets.Dataset, bins: Bins) -> None:
    """CPU time of a batch out of torch's loader over our parts, the same over trl's, and a copy of its bytes,
    in turns."""
    loader = DataLoader(TokenDataset(source), batch_sampler=bins, collate_fn=PackedCollator())
    trl = DataLoader(source, batch_sampler=bins, collate_fn=trl_collator())
    for _ in loader:
        pass  # map the pages of the file: that is the cost of a first epoch, whoever reads it
    num_bytes = batch_bytes(ours(source), bins[0])
    ways = {"ours": iter(loader), "trl": iter(trl), "copy": iter(copy(num_bytes), object())}
    us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, items in ways.items():
            us[name].append(thread_microseconds(items, 6 if name == "trl" else 50))
    table, row = "a batch of 65,536 tokens in torch's loader", "CPU time"
    record(table, row, "trl over ours", over(us["trl"], us["ours"]), "x")
    record(table, row, "ours over a copy of its bytes", over(us["ours"], us["copy"]), "x")
    for name, values in us.items():
        record(table, row, name, values, "us")


def thread_microseconds(items: Iterator[object], count: int, warmup: int = 2) -> float:
    """CPU time of this thread for each of the next `count` items."""
    keep = [next(items) for _ in range(warmup)][-1]
    start = time.thread_time()
    for _ in range(count):
        keep = next(items)
    del keep
    return (time.thread_time() - start) / count * 1e6
