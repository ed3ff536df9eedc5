"""One rank's batch as row ids, and where the run stands behind it.

The one rule: a batch says everything about itself, so no one who holds it has to ask the sampler that made
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run resumes, as plain numbers: the same on every rank."""

    epoch: int = 0
    batches: int = 0
    """Global batches of the epoch before the optimizer step (or balance window) that is under way."""
    micro_steps: int = 0
    """Micro-steps of it that were taken; 0 unless batches are balanced inside a step."""

    @property
    def starts_epoch(self) -> bool:
        """Whether nothing of the epoch was consumed: a batch with this mark was the last of the one before."""
        return self.batches == self.micro_steps == 0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What an epoch leaves out because of `drop_last` or tail="drop"."""

    sequences: int = 0
    tokens: int = 0
    """0 where lengths are unknown."""


class BatchIndices(list[int]):
    """Row ids of one batch, and what a collator and a loader must know beside them. Survives pickling and
    plain loaders.

    Args:
        rows: row ids, bin after bin.
        bin_offsets: boundaries of the bins inside `rows`, from 0 to the number of rows; None for one bin.
        bin_capacity: token slots of each bin; 0 where nothing is packed.
        repeated: the batch repeats rows of the epoch only to even out the ranks.
        after: where a run resumes once this batch was consumed; None where no order gave the batch.
        left_out: of the last batch of an epoch: what the epoch leaves out.
        groups: the group of each row, where rows had to stay together.
    """

    bin_offsets: tuple[int, ...]
    bin_capacity: int
    repeated: bool
    after: Place | None
    left_out: LeftOut
    groups: tuple[int, ...] | None

    def __init__(
        self,
        rows: Iterable[int],
        bin_offsets: Sequence[int] | None = None,
        *,
        bin_capacity: int = 0,
        repeated: bool = False,
        after: Place | None = None,
        left_out: LeftOut | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rows)
        self.bin_offsets = (0, len(self)) if bin_offsets is None else tuple(bin_offsets)
        self.bin_capacity = bin_capacity
        self.repeated = repeated
        self.after = after
        self.left_out = left_out or LeftOut()
        self.groups = None if groups is None else tuple(groups)

    @classmethod
    def of_bins(cls, bins: Iterable[Iterable[int]], *, bin_capacity: int = 0) -> BatchIndices:
        """A batch of several bins."""
        rows: list[int] = []
        ends = [0]
        for content in bins:
            rows += content
            ends.append(len(rows))
        return cls(rows, ends, bin_capacity=bin_capacity)

    @property
    def bins(self) -> list[list[int]]:
        """Row ids of each bin."""
        return [self[a:b] for a, b in zip(self.bin_offsets[:-1], self.bin_offsets[1:], strict=True)]

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(self.bin_offsets) - 1

    @property
    def ends_epoch(self) -> bool:
        """Whether this is its rank's last batch of an epoch."""
        return self.after is not None and self.after.starts_epoch

    def as_repeat(self) -> BatchIndices:
        """The same rows, marked so that they count for nothing."""
        return BatchIndices(
            self, self.bin_offsets, bin_capacity=self.bin_capacity, repeated=True, groups=self.groups
        )
