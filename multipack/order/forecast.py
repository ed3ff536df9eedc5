"""Bins, steps and efficiency of a data set from its histogram of lengths, without a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from multipack import _core
from multipack.order.packing import as_lengths, checked_capacity, sequence_limit


@dataclass(frozen=True)
class Forecast:
    """What packing a data set of that histogram gives, without a plan."""

    num_sequences: int
    num_tokens: int
    num_bins: int
    """Bins of best-fit decreasing over all rows; a plan in windows needs up to one more a window."""
    lower_bound: int
    efficiency: float

    def steps(self, num_replicas: int, accumulate: int = 1, bins_per_batch: int = 1) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.num_bins // (num_replicas * accumulate * bins_per_batch))


def forecast(histogram: ArrayLike, capacity: int, max_sequences_per_bin: int | None = None) -> Forecast:
    """Estimate bins, steps and efficiency from a histogram of lengths alone; 10^11 rows take milliseconds.

    Args:
        histogram: histogram[l] = number of sequences of l tokens, shape [longest + 1]; entry 0 must be 0.

    Raises:
        ValueError: a length above the capacity, a negative count, or more tokens than 64 bits hold.
    """
    counts = as_lengths(histogram)
    capacity = checked_capacity(capacity)
    if counts.size and counts.min() < 0:
        raise ValueError(f"histogram[{int(np.argmin(counts))}] is {int(counts.min())}, below 0.")
    if counts.size and counts[0]:
        raise ValueError(
            f"histogram[0] counts {int(counts[0])} empty sequences, which no bin can hold. Set it to 0."
        )
    used = np.flatnonzero(counts)
    if used.size and used[-1] > capacity:
        raise ValueError(
            f"the histogram holds sequences of {used[-1]} tokens, above the capacity of {capacity}."
        )
    exact = [int(count) for count in counts[used]]
    num_tokens = sum(count * int(length) for count, length in zip(exact, used, strict=True))
    if num_tokens >= 2**63:
        raise ValueError(
            f"the histogram holds {num_tokens} tokens, above the 2^63 - 1 that sums are kept in."
        )
    table = np.zeros(capacity + 1, np.int64)
    table[used] = exact
    limit = sequence_limit(max_sequences_per_bin)
    num_bins = int(_core.best_fit_decreasing_bins(table, capacity, limit))
    return Forecast(
        num_sequences=sum(exact),
        num_tokens=num_tokens,
        num_bins=num_bins,
        lower_bound=int(_core.lower_bound(table, capacity, limit)),
        efficiency=num_tokens / (num_bins * capacity) if num_bins else 0.0,
    )
