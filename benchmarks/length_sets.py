"""Lengths that the packing benchmarks run on: named distributions from seeds, and whole real sets where the
folder `shared` is there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.real_lengths import REAL_LENGTHS

SHARED = Path(__file__).parents[2] / "shared"

Lengths = npt.NDArray[np.int32]


def lognormal(num_rows: int, capacity: int = 4096, seed: int = 0) -> Lengths:
    """Instruction data: mean 350, sigma 1, clipped to 8..4096."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(350) - 0.5, 1.0, num_rows), 8, 4096).astype(np.int32)


def heavy_tail(num_rows: int, capacity: int = 32768, seed: int = 0) -> Lengths:
    """Documents: log-normal with mu 6.5 and sigma 1.3, clipped to 8..32768."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(6.5, 1.3, num_rows), 8, 32768).astype(np.int32)


def uniform(num_rows: int, capacity: int = 4096, seed: int = 0) -> Lengths:
    """1..capacity, so that half of the sequences exceed half a bin."""
    return np.random.default_rng(seed).integers(1, capacity + 1, num_rows).astype(np.int32)


def bimodal(num_rows: int, capacity: int = 4096, seed: int = 0) -> Lengths:
    """70 % short (a twentieth of a bin), 30 % just above half a bin."""
    rng = np.random.default_rng(seed)
    short = rng.normal(0.05, 0.01, num_rows)
    long = rng.normal(0.55, 0.08, num_rows)
    shares = np.where(rng.random(num_rows) < 0.7, short, long)
    lengths: Lengths = np.clip(capacity * shares, 1, capacity).astype(np.int32)
    return lengths


def triplets(num_rows: int, capacity: int = 4096, seed: int = 0) -> Lengths:
    """Triples of a quarter to half a bin that fill it exactly, shuffled: the worst case for sorting
    packers."""
    rng = np.random.default_rng(seed)
    quarter, half, count = capacity // 4, capacity // 2, num_rows // 3
    a = rng.integers(quarter, half, count)
    b = np.minimum(rng.integers(quarter, half, count), capacity - a - quarter)
    lengths = np.concatenate([a, b, capacity - a - b])
    rng.shuffle(lengths)
    return lengths.astype(np.int32)


def from_quantiles(quantiles: Sequence[int], num_rows: int, capacity: int, seed: int = 0) -> Lengths:
    """Rows whose lengths have these quantiles, at equal distances from 0 to 100 %."""
    places = np.random.default_rng(seed).random(num_rows)
    drawn: Lengths = np.interp(places, np.linspace(0, 1, len(quantiles)), quantiles).astype(np.int32)
    return drawn


Workload = tuple[Callable[[int, int], Lengths], int]
"""Lengths of so many rows at a capacity, and the capacity."""

MADE: dict[str, Workload] = {
    "log-normal": (lognormal, 4096),
    "log-normal, long bins": (lognormal, 65536),
    "heavy tail": (heavy_tail, 32768),
    "uniform": (uniform, 4096),
    "bimodal": (bimodal, 4096),
    "triplets": (triplets, 4096),
}
REAL: dict[str, Workload] = {
    name: (partial(from_quantiles, quantiles), capacity)
    for name, (quantiles, capacity) in REAL_LENGTHS.items()
}
WORKLOADS = MADE | REAL


def shared(name: str) -> Path:
    """A folder of lengths or instances beside the checkout."""
    if not SHARED.is_dir():
        raise FileNotFoundError(
            f"no folder {SHARED.name} beside the checkout, whose {name} this benchmark measures."
        )
    return SHARED / "data" / name


def real_sets(capacity: int) -> Iterator[tuple[str, Lengths]]:
    """Every real set of lengths in random order; rows above the capacity are left out. Histograms are no sets
    of rows."""
    for path in sorted(shared("lengths").glob("*.npy")):
        if path.stem.startswith("hist_"):
            continue
        lengths = np.load(path).astype(np.int64)
        lengths = lengths[(lengths > 0) & (lengths <= capacity)]
        yield path.stem, np.random.default_rng(0).permutation(lengths).astype(np.int32)


def bin_packing_instances(family: str) -> list[dict[str, Any]]:
    """Instances of a family with a proved optimum (key `upper`), items in random order."""
    path = shared("binpacking") / "bpp_instances.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        instances = [json.loads(line) for line in lines]
    chosen = [instance for instance in instances if instance["set"] == family and instance["proved"]]
    for instance in chosen:
        instance["items"] = np.random.default_rng(1).permutation(instance["items"]).astype(np.int32)
    return chosen
