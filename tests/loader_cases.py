"""Loaders that several test modules open, and how they look at their batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import (
    Dataset,
)

from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader

WAYS = [
    {"num_workers": 0},
    {"num_workers": 1, "prefetch_batches": 7, "worker_type": "thread"},
    {"num_workers": 3, "worker_type": "thread"},
    {"num_workers": 2, "worker_type": "process"},
]


def token_rows(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose tokens all are the row's number, so that a batch tells which rows it holds."""
    lengths = np.random.default_rng(seed).integers(1, 60, count)
    return np.repeat(np.arange(count), lengths).astype(np.int32), np.concatenate(([0], np.cumsum(lengths)))


def packed(**arguments: Any) -> DataLoader[dict[str, Any]]:
    return packed_dataloader(token_rows(), 256, rank=0, num_replicas=1, **arguments)


def key(batch: dict[str, Any]) -> tuple[int, ...]:
    return tuple(batch["input_ids"].flatten().tolist())


def keys(batches: Any) -> list[tuple[int, ...]]:
    return [key(batch) for batch in batches]


def take(loader: Any, count: int) -> list[Any]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


class Rows(Dataset[int]):
    """Row i is i; counts its reads."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]
