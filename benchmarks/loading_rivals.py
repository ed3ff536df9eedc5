"""The loaders that are compared: one data set, one list of bins, the same batches out of each.

Rows lie in a memory-mapped `datasets.Dataset` (`workloads.saved_dataset`). Each rival is a function of the
data that returns an iterator over the batches of the bins. Rows come as Python lists unless their user asks
for tensors, which trl's collator takes in about half of the time; rivals that few use without care get those.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from benchmarks.rivals import trl_collator
from benchmarks.workloads import CAPACITY, saved_dataset
from multipack import DataLoader, DistributedBatchSampler, MultipackBatchSampler, PackedCollator, TokenDataset


class Workload(NamedTuple):
    """Rows on disk, and the bins of one epoch."""

    rows: datasets.Dataset
    tensor_rows: datasets.Dataset
    dataset: TokenDataset
    bins: list[list[int]]


@contextlib.contextmanager
def workload(num_rows: int) -> Iterator[Workload]:
    """Write the rows, open them memory-mapped, and plan an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        datasets.disable_progress_bars()
        rows = saved_dataset(Path(folder) / "rows", num_rows)
        dataset = TokenDataset(rows)
        sampler = MultipackBatchSampler(dataset.lengths, CAPACITY)
        yield Workload(rows, rows.with_format("torch"), dataset, [list(ids) for ids in sampler])


def torch_loader(data: Workload, *, workers: int, tensors: bool = False) -> Iterator[Any]:
    rows = data.tensor_rows if tensors else data.rows
    more: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
    return iter(
        TorchDataLoader(rows, batch_sampler=data.bins, collate_fn=trl_collator(), num_workers=workers, **more)
    )


def stateful_loader(data: Workload) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(data.tensor_rows, batch_sampler=data.bins, collate_fn=trl_collator()))


def spdl_loader(data: Workload) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(data.bins).pipe(data.tensor_rows.__getitems__)
    pipeline = builder.pipe(trl_collator()).add_sink(4).build(num_threads=1)
    with pipeline.auto_stop():
        yield from pipeline


def grain_loader(data: Workload) -> Iterator[Any]:
    import grain

    collate, rows = trl_collator(), data.tensor_rows
    batches = grain.MapDataset.source(data.bins).map(lambda ids: collate(rows.__getitems__(ids)))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(read_options=options))


def plain_loader_over_ours(data: Workload) -> Iterator[Any]:
    """torch's own loader over our data set, sampler and collator: what a framework makes of ours when it
    rebuilds it."""
    sampler = DistributedBatchSampler(
        MultipackBatchSampler(data.dataset.lengths, CAPACITY), num_replicas=1, rank=0
    )
    return iter(TorchDataLoader(data.dataset, batch_sampler=sampler, collate_fn=PackedCollator()))


def our_loader(data: Workload, *, workers: int = 1) -> Iterator[Any]:
    sampler = DistributedBatchSampler(
        MultipackBatchSampler(data.dataset.lengths, CAPACITY), num_replicas=1, rank=0
    )
    return iter(
        DataLoader(data.dataset, batch_sampler=sampler, collate_fn=PackedCollator(), num_workers=workers)
    )


RIVALS: dict[str, Callable[[Workload], Iterator[Any]]] = {
    "torch DataLoader + trl, 0 workers": functools.partial(torch_loader, workers=0),
    "torch DataLoader + trl, 1 worker": functools.partial(torch_loader, workers=1),
    "torch DataLoader + trl, 2 workers": functools.partial(torch_loader, workers=2),
    "torch DataLoader + trl, rows as tensors": functools.partial(torch_loader, workers=0, tensors=True),
    "StatefulDataLoader + trl, rows as tensors": stateful_loader,
    "spdl pipeline + trl, rows as tensors": spdl_loader,
    "grain + trl, rows as tensors": grain_loader,
}
OURS: dict[str, Callable[[Workload], Iterator[Any]]] = {
    "torch DataLoader over our parts": plain_loader_over_ours,
    "multipack DataLoader, 0 workers": functools.partial(our_loader, workers=0),
    "multipack DataLoader, 1 thread": our_loader,
    "multipack DataLoader, 2 threads": functools.partial(our_loader, workers=2),
}


def assert_same_batch(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The rival's batch, bit for bit, in all that both have."""
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(ours[name], theirs[name]), name
