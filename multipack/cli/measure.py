"""Measure how fast this machine makes packed batches, and whether a training loop would wait for them.

One rule: every figure comes from the loader that training uses, over the user's own lengths.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from multipack.cli.scan import Progress, Scanned, scanned_files
from multipack.data.dataset import TokenDataset
from multipack.data.overlong import Overlong
from multipack.data.text.files import kind_of
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.order.packing import MethodName

_MOST_MADE_UP_TOKENS = 200_000_000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of threads."""

    workers: int
    first_batch_ms: float
    """From asking for the loader's iterator to the first batch: planning the first window, starting threads,
    making one batch."""
    batches_per_second: float
    """As fast as they can be taken."""
    tokens_per_second: float
    step_ms: float
    """The step of the simulated training loop."""
    wait_share: float
    """Share of its time that the loop waited for batches, 0..1. Above 0.01 the loader is too slow for it."""
    queue_occupancy: float
    """Mean share of the queue that was ready, 0..1; 0 where nothing is made ahead."""

    @property
    def shortest_step_ms(self) -> float:
        """Steps of this length or longer are fed without waiting, if the loop leaves a core to the loader."""
        return 1e3 / self.batches_per_second


@dataclass(frozen=True)
class Tokens:
    """What is read."""

    dataset: TokenDataset
    description: str


def measure(
    tokens: Tokens,
    *,
    capacity: int,
    bins_per_batch: int,
    method: MethodName,
    workers: Sequence[int],
    step_ms: float,
    seconds: float,
    progress: Progress,
) -> list[Measured]:
    """Run the loader flat out and behind steps of `step_ms`, `seconds` each, for every number of threads."""

    def loader(num_workers: int) -> DataLoader[Any]:
        return packed_dataloader(
            tokens.dataset,
            capacity,
            bins_per_batch=bins_per_batch,
            method=method,
            num_workers=num_workers,
            rank=0,
            num_replicas=1,
        )

    measured = []
    for number, num_workers in enumerate(workers):
        progress("measuring", 2 * number, 2 * len(workers))
        fast = loader(num_workers)
        first_batch_s = _first_batch_seconds(fast)
        fast.stats.reset()
        _run(fast, 0.0, seconds)
        progress("measuring", 2 * number + 1, 2 * len(workers))
        paced = loader(num_workers)
        _run(paced, step_ms / 1e3, seconds)
        taken = fast.stats.start_seconds + fast.stats.loop_seconds
        measured.append(
            Measured(
                workers=num_workers,
                first_batch_ms=first_batch_s * 1e3,
                batches_per_second=fast.stats.batches / taken,
                tokens_per_second=fast.stats.tokens / taken,
                step_ms=step_ms,
                wait_share=paced.stats.wait_share,
                queue_occupancy=paced.stats.queue_occupancy,
            )
        )
    progress("measuring", 2 * len(workers), 2 * len(workers))
    return measured


def _first_batch_seconds(loader: DataLoader[Any]) -> float:
    started = time.perf_counter()
    with iter(loader) as batches:
        next(batches)
        return time.perf_counter() - started


def _run(loader: DataLoader[Any], step_s: float, seconds: float) -> None:
    """Take batches for that long, over as many epochs as it needs; a sleeping thread stands for a busy
    GPU."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        with iter(loader) as batches:
            for _ in batches:
                if step_s:
                    time.sleep(step_s)
                if time.perf_counter() >= until:
                    break


def open_tokens(
    paths: Sequence[Path], scanned: Scanned, *, split: str | None, capacity: int, overlong: Overlong
) -> Tokens:
    """The data as they lie where they are token columns on disk; else made-up tokens of the same lengths.

    Raises:
        ValueError: no row fits the capacity.
    """
    files = [file for path in paths for file in scanned_files(path, split)]
    table = None if scanned.made_up else _table(files, scanned.column)
    reading: dict[str, Any] = {"max_length": capacity, "overlong": overlong}
    if table is not None:
        dataset = TokenDataset(table, column=scanned.column, columns=[], **reading)
        description = f"column {scanned.column!r}, read where it lies"
    else:
        lengths = _no_more_than(scanned.lengths, _MOST_MADE_UP_TOKENS)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        values = np.random.default_rng(0).integers(0, 32_000, int(offsets[-1]), dtype=np.int32)
        dataset = TokenDataset((values, offsets), **reading)
        first = "" if len(lengths) == len(scanned.lengths) else f" of the first {len(lengths):,} rows"
        description = f"random tokens in memory, with the lengths{first}"
    if not len(dataset):
        raise ValueError(
            f"no row has 1 to {capacity} tokens, so none fits a bin: raise --capacity, or choose --overlong "
            "split."
        )
    return Tokens(dataset, description)


def _table(files: Sequence[Path], column: str) -> Any:
    """Token columns of Arrow data; None for other kinds of file."""
    if len(files) == 1 and files[0].is_dir():
        import datasets

        return datasets.load_from_disk(str(files[0]))
    if all(kind_of(file) == "parquet" for file in files):
        return pa.concat_tables([pq.read_table(file, columns=[column], memory_map=True) for file in files])
    return None


def _no_more_than(lengths: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """As many of the first rows as hold at most so many tokens, at least one."""
    fitting = int(np.searchsorted(np.cumsum(lengths), most, side="right"))
    return lengths[: max(1, fitting)]
