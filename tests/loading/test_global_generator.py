"""Loaders over our own parts leave every global generator alone; over foreign ones they draw exactly what
torch's draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_cases import token_rows
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset
from torch.utils.data import DataLoader as TorchDataLoader

from multipack import (
    DataLoader,
    DistributedBatchSampler,
    MultipackBatchSampler,
    PackedCollator,
    StreamPacker,
    TokenDataset,
)

WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 0},
    {"num_workers": 2, "worker_type": "auto"},
    {"num_workers": 2, "worker_type": "thread"},
    {"num_workers": 2, "worker_type": "process"},
]
PERSISTENT: list[dict[str, Any]] = [
    *WAYS,
    {"num_workers": 1, "worker_type": "process", "persistent_workers": True},
]


def states() -> tuple[list[int], Any, list[str]]:
    return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]


class TokenRows(IterableDataset[Any]):
    """Rows of 1 to 40 tokens, always the same."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter([{"input_ids": [row] * (1 + row * 7 % 40)} for row in range(120)])


def bare_sampler(**way: Any) -> Any:
    rows = TokenDataset(token_rows())
    return DataLoader(
        rows, batch_sampler=MultipackBatchSampler(rows.lengths, 256), collate_fn=PackedCollator(), **way
    )


def dealt(**way: Any) -> Any:
    rows = TokenDataset(token_rows())
    sampler = DistributedBatchSampler(MultipackBatchSampler(rows.lengths, 256), num_replicas=2, rank=1)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=PackedCollator(), **way)


def dealt_foreign(**way: Any) -> Any:
    """torch's seeded sampler, dealt by ours."""
    rows = TokenDataset(token_rows())
    shuffled: Any = DistributedSampler(range(len(rows)), num_replicas=1, rank=0, seed=3)
    sampler = DistributedBatchSampler(BatchSampler(shuffled, 8, False), num_replicas=2, rank=1)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=PackedCollator(), **way)


def stream(**way: Any) -> Any:
    packer = StreamPacker(TokenRows(), 128, num_replicas=1, rank=0)
    return DataLoader(packer, batch_size=None, collate_fn=PackedCollator(), **way)


@pytest.mark.parametrize("way", PERSISTENT, ids=str)
@pytest.mark.parametrize("make", [bare_sampler, dealt, dealt_foreign, stream])
def test_packed_loaders_and_streams_never_draw_from_a_global_generator(
    make: Callable[..., Any], way: dict[str, Any]
) -> None:
    way = dict(way)
    if make is stream and way.get("num_workers"):
        way["num_workers"] = 1  # a stream has one reader
    before = states()
    loader = make(**way)
    state = loader.state_dict()
    for _ in range(2):
        assert len(list(loader)) > 3
    iterator = iter(loader)  # and a pass that is broken off
    next(iterator)
    del iterator
    loader.load_state_dict(state)
    next(iter(loader))
    assert states() == before


@pytest.mark.parametrize("seeds", [(0, 1), (7, 8)])
@pytest.mark.parametrize("way", WAYS[:3], ids=str)
def test_packed_batches_do_not_depend_on_the_global_seed(way: dict[str, Any], seeds: tuple[int, int]) -> None:
    batches = []
    for seed in seeds:
        torch.manual_seed(seed)
        batches.append([batch["input_ids"].tolist() for batch in bare_sampler(**way)])
    assert batches[0] == batches[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_over_foreign_parts_the_global_generator_ends_where_torch_leaves_it(
    workers: int, shuffle: bool
) -> None:
    def run(loader_class: Any) -> Any:
        torch.manual_seed(1)
        loader = loader_class(range(12), batch_size=4, shuffle=shuffle, num_workers=workers)
        batches = [batch.tolist() for _ in range(2) for batch in loader]
        return batches, torch.get_rng_state().tolist()

    assert run(DataLoader) == run(TorchDataLoader)


@pytest.mark.parametrize("workers", [0, 1])
def test_over_a_foreign_stream_the_global_generator_ends_where_torch_leaves_it(workers: int) -> None:
    def run(loader_class: Any) -> Any:
        torch.manual_seed(1)
        loader = loader_class(TokenRows(), batch_size=None, num_workers=workers)
        return [len(row["input_ids"]) for _ in range(2) for row in loader], torch.get_rng_state().tolist()

    assert run(DataLoader) == run(TorchDataLoader)
