"""Boundaries, and one number a sequence, in tensors whose shapes never change.

A bin holds at most `max_sequences_per_bin` sequences and one stretch of padding, so a batch has at most `bins
* (max_sequences_per_bin + 1)` segments. One rule: what a batch does not need of that is filled with empty
segments, which begin and end at the same slot, so that neither a shape nor `max_length_q` tells one batch
from another. Bins are planned under the same limit, hence nothing can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True)
class StaticShape:
    """What all batches of a run have in common."""

    bins: int
    """Bins of a full batch."""
    capacity: int
    """Token slots of a bin, and the longest segment that any batch may have."""
    max_sequences_per_bin: int

    @property
    def max_sequences(self) -> int:
        """Entries of a tensor with one number a sequence."""
        return self.bins * self.max_sequences_per_bin

    def bin_offsets(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Offsets of `bins` bins: a batch of the end of an epoch may have fewer, and empty ones are added to
        it.

        Raises:
            ValueError: there are more bins, or a bin has more sequences, than the shape was made for.
        """
        given = len(offsets) - 1
        if given > self.bins:
            raise ValueError(
                f"a batch has {given} bins, but static shapes were made for bins_per_batch={self.bins}: give "
                "the collator the bins_per_batch of the batch sampler."
            )
        most = int((offsets[1:] - offsets[:-1]).max())
        if most > self.max_sequences_per_bin:
            raise ValueError(
                f"a bin holds {most} sequences, but static shapes were made for "
                f"max_sequences_per_bin={self.max_sequences_per_bin}: plan the bins with "
                f"max_sequences_per_bin={self.max_sequences_per_bin}, or give the collator {most} or more."
            )
        return offsets if given == self.bins else np.append(offsets, [offsets[-1]] * (self.bins - given))

    def cut_padding(self, boundaries: npt.NDArray[np.int32], first: int) -> npt.NDArray[np.int32]:
        """Cut the padding, the slots from `first` to the last boundary, into segments of at most `capacity`
        slots.

        Several bins of a flat batch share one stretch of padding, which may be longer than any sequence;
        attention is told that no segment is longer than `capacity`.
        """
        if boundaries[-1] - first <= self.capacity:
            return boundaries
        cuts = np.arange(first, int(boundaries[-1]), self.capacity, dtype=np.int32)[1:]
        return np.concatenate((boundaries[:-1], cuts, boundaries[-1:]))

    def flat_boundaries(self, boundaries: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """int32 [bins * (max_sequences_per_bin + 1) + 1]: the boundaries, then the last one again and
        again."""
        filled = np.full(self.bins * (self.max_sequences_per_bin + 1) + 1, boundaries[-1], np.int32)
        filled[: len(boundaries)] = boundaries
        return filled

    def row_boundaries(self, boundaries: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The same for batches of a row a bin: entries r * (max_sequences_per_bin + 1) and following belong
        to row r, and repeat the end of the row."""
        per_row = self.max_sequences_per_bin + 1
        filled = np.repeat(self._row_ends, per_row + self._is_last_row)
        starts = boundaries[:-1]
        firsts = starts.searchsorted(self._row_ends - self.capacity).tolist()
        for row, (first, last) in enumerate(pairwise([*firsts, len(starts)])):
            filled[row * per_row : row * per_row + last - first] = starts[first:last]
        return filled

    @cached_property
    def _row_ends(self) -> npt.NDArray[np.int32]:
        return np.arange(1, self.bins + 1, dtype=np.int32) * self.capacity

    @cached_property
    def _is_last_row(self) -> npt.NDArray[np.bool_]:
        last: npt.NDArray[np.bool_] = np.arange(self.bins) == self.bins - 1
        return last

    def real_boundaries(self, boundaries: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """int32 [max_sequences + 1]: boundaries without padding, then the last one again and again."""
        filled = np.full(self.max_sequences + 1, boundaries[-1], np.int32)
        filled[: len(boundaries)] = boundaries
        return filled

    def pad_sequences(self, batch: dict[str, Any], fills: dict[str, int]) -> None:
        """Lengthen every tensor of one number a sequence to `max_sequences`, with `fills` (0 if not
        named)."""
        for name, values in batch.items():
            if isinstance(values, torch.Tensor) and values.ndim == 1:
                padded = values.new_full((self.max_sequences,), fills.get(name, 0))
                padded[: len(values)] = values
                batch[name] = padded


def round_up(length: int, multiple: int | None) -> int:
    """The next multiple at or above `length`; `length` where there is none."""
    return length if multiple is None else -(-length // multiple) * multiple
