"""The loaders that are compared: one data set, one list of bins, the same batches out of each.

Rows lie in a memory-mapped `datasets.Dataset` of 200 chunks (input_ids and labels, list<int32>), lengths log-normal with mean 350,
clipped at 4096. Each rival is a function of the bins that returns an iterator over batches.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from multipack import DataLoader, DistributedBatchSampler, MultipackBatchSampler, PackedCollator, TokenDataset

CAPACITY = 65_536


class Workload(NamedTuple):
    """Rows on disk, and the bins of one epoch."""

    rows: datasets.Dataset
    tensor_rows: datasets.Dataset
    dataset: TokenDataset
    bins: list[list[int]]


def token_table(num_rows: int, seed: int = 0) -> pa.Table:
    """Rows of random tokens, of which the first third of each row is no target."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(350) - 0.5, 1.0, num_rows), 8, 4096).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = rng.integers(5, 128_000, offsets[-1], dtype=np.int32)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    labels = np.where(position < np.repeat(lengths // 3, lengths), np.int32(-100), tokens)
    columns = {
        name: pa.ListArray.from_arrays(offsets, values)
        for name, values in (("input_ids", tokens), ("labels", labels))
    }
    return pa.table(columns)


@contextlib.contextmanager
def workload(num_rows: int) -> Iterator[Workload]:
    """Write the rows, open them memory-mapped, and plan an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        table = token_table(num_rows)
        path = Path(folder) / "rows"
        datasets.disable_progress_bars()
        datasets.Dataset(table).save_to_disk(str(path), num_shards=1)
        rows = datasets.load_from_disk(str(path))
        dataset = TokenDataset(rows)
        sampler = MultipackBatchSampler(dataset.lengths, CAPACITY)
        yield Workload(rows, rows.with_format("torch"), dataset, [list(ids) for ids in sampler.begin()])


def _trl() -> Callable[[Any], dict[str, torch.Tensor]]:
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def torch_loader(data: Workload, *, workers: int, tensors: bool = False) -> Iterator[Any]:
    rows = data.tensor_rows if tensors else data.rows
    more: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
    return iter(
        TorchDataLoader(rows, batch_sampler=data.bins, collate_fn=_trl(), num_workers=workers, **more)
    )


def stateful_loader(data: Workload) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(data.rows, batch_sampler=data.bins, collate_fn=_trl()))


def spdl_loader(data: Workload) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    collate = _trl()
    builder = PipelineBuilder().add_source(data.bins).pipe(data.rows.__getitems__).pipe(collate).add_sink(4)
    pipeline = builder.build(num_threads=1)
    with pipeline.auto_stop():
        yield from pipeline


def grain_loader(data: Workload) -> Iterator[Any]:
    import grain

    collate, rows = _trl(), data.rows
    batches = grain.MapDataset.source(data.bins).map(lambda ids: collate(rows.__getitems__(ids)))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(read_options=options))


def plain_loader_over_ours(data: Workload) -> Iterator[Any]:
    """torch's own loader over our data set, sampler and collator: what a framework makes of ours when it rebuilds it."""
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
    "StatefulDataLoader + trl": stateful_loader,
    "spdl pipeline + trl": spdl_loader,
    "grain + trl": grain_loader,
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
