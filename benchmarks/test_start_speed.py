"""From a data set on disk to its first batch, and back into the middle of an epoch.

    taskset -c 1 python -m pytest benchmarks/test_start_speed.py

100,000 memory-mapped rows of log-normal lengths, bins of 65,536 tokens; imports are done. Rivals get their
rows as tensors, which their collator takes faster than lists. Starting counts the planning of the epoch; trl
packs by writing the rows anew. Resuming starts from a saved position after 100 batches of an epoch whose bins
the rivals are given; ours is measured with those bins as well as with planning the epoch anew. The batch that
comes first is checked against that of a run never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import accelerate
import datasets
import lightbinpack
import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trl import pack_dataset

from benchmarks.loading_rivals import Workload, assert_same_batch, workload
from benchmarks.rivals import trl_collator
from benchmarks.workloads import CAPACITY
from multipack import DataLoader, PackedCollator, TokenDataset, packed_dataloader

pytestmark = pytest.mark.filterwarnings("ignore")  # the rivals' own
DONE = 100


@pytest.fixture(scope="module")
def data() -> Iterator[Workload]:
    torch.set_num_threads(1)
    datasets.disable_caching()
    with workload(100_000) as data:
        yield data


def our_loader(data: Workload) -> Any:
    return packed_dataloader(data.rows, CAPACITY, num_replicas=1, rank=0)


def torch_loader(data: Workload, bins: list[list[int]]) -> Any:
    return TorchDataLoader(data.tensor_rows, batch_sampler=bins, collate_fn=trl_collator())


def start_ours(data: Workload) -> Any:
    return next(iter(our_loader(data)))


def start_lightbinpack(data: Workload) -> Any:
    """Lengths out of the table, shuffled, packed, and the bins to torch's loader: a careful user's own
    script."""
    lengths = pc.list_value_length(data.rows.data.table.column("input_ids")).to_numpy()
    order = np.random.default_rng(0).permutation(len(lengths))
    bins = [order[ids].tolist() for ids in lightbinpack.obfdp(lengths[order].tolist(), CAPACITY)]
    return next(iter(torch_loader(data, bins)))


def start_trl(data: Workload) -> Any:
    packed = pack_dataset(data.rows, CAPACITY, strategy="bfd")
    return next(iter(TorchDataLoader(packed, batch_size=1, collate_fn=trl_collator())))


STARTS: dict[str, tuple[Callable[[Workload], Any], int]] = {
    "multipack": (start_ours, 10),
    "lightbinpack obfdp, torch DataLoader, trl's collator": (start_lightbinpack, 5),
    "trl pack_dataset, torch DataLoader, trl's collator": (start_trl, 1),
}


@pytest.mark.benchmark(group="first batch of 100,000 rows")
@pytest.mark.parametrize("name", STARTS)
def test_first_batch(benchmark: Any, data: Workload, name: str) -> None:
    start, rounds = STARTS[name]
    tokens = start(data)["input_ids"].numel()
    assert 0.999 * CAPACITY <= tokens <= CAPACITY
    benchmark.pedantic(start, (data,), rounds=rounds)


def our_loader_of_bins(data: Workload) -> Any:
    return DataLoader(TokenDataset(data.rows), batch_sampler=data.bins, collate_fn=PackedCollator())


def stateful_loader(data: Workload) -> Any:
    return StatefulDataLoader(data.tensor_rows, batch_sampler=data.bins, collate_fn=trl_collator())


def resume_by_state(make: Callable[[Workload], Any], data: Workload) -> Callable[[], Any]:
    loader = make(data)
    batches = iter(loader)
    for _ in range(DONE):
        next(batches)
    state = loader.state_dict()

    def resume() -> Any:
        again = make(data)
        again.load_state_dict(state)
        return next(iter(again))

    return resume


def resume_accelerate(data: Workload) -> Callable[[], Any]:
    return lambda: next(iter(accelerate.skip_first_batches(torch_loader(data, data.bins), DONE)))


def resume_by_reading(data: Workload) -> Callable[[], Any]:
    def resume() -> Any:
        batches = iter(torch_loader(data, data.bins))
        for _ in range(DONE):
            next(batches)
        return next(batches)

    return resume


RESUMES: dict[str, tuple[Callable[[Workload], Callable[[], Any]], int]] = {
    "multipack": (partial(resume_by_state, our_loader_of_bins), 10),
    "multipack, planning included": (partial(resume_by_state, our_loader), 10),
    "StatefulDataLoader, trl's collator": (partial(resume_by_state, stateful_loader), 5),
    "accelerate skip_first_batches, trl's collator": (resume_accelerate, 5),
    "torch DataLoader, read and dropped, trl's collator": (resume_by_reading, 1),
}


@pytest.mark.benchmark(group=f"resume after {DONE} batches")
@pytest.mark.parametrize("name", RESUMES)
def test_resume(benchmark: Any, data: Workload, name: str) -> None:
    make, rounds = RESUMES[name]
    resume = make(data)
    reference = trl_collator()(data.rows.__getitems__(data.bins[DONE]))
    assert_same_batch(resume(), reference)
    benchmark.pedantic(resume, rounds=rounds)
