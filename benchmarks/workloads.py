"""Data that the benchmarks run on, made from seeds."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

CAPACITY = 65_536
"""Token slots of a bin in the collate and loader benchmarks."""


def lognormal_lengths(
    num_rows: int, *, mean: float = 350, sigma: float = 1.0, longest: int = 4096
) -> npt.NDArray[np.int64]:
    """Lengths as instruction data have them: median well below the mean, clipped to 8..longest."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_rows)
    return np.clip(lengths, 8, longest).astype(np.int64)


def saved_dataset(folder: Path, num_rows: int = 200_000) -> datasets.Dataset:
    """A memory-mapped data set of `input_ids` and `labels` (list<int32>, a third of each row masked), in
    chunks of 1000 rows."""
    lengths = lognormal_lengths(num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(1).integers(5, 128_000, offsets[-1], dtype=np.int32)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    labels = np.where(position < np.repeat(lengths // 3, lengths), np.int32(-100), ids)
    columns = {
        name: pa.ListArray.from_arrays(offsets.astype(np.int32), values)
        for name, values in (("input_ids", ids), ("labels", labels))
    }
    datasets.Dataset(pa.table(columns)).save_to_disk(folder, num_shards=1)
    return datasets.load_from_disk(folder)
