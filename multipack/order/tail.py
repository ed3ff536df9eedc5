"""What to do with the batches that do not fill a last micro-step.

Every rank must get a batch or none: a rank that took one step more would wait for the others for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias, TypeVar

Tail: TypeAlias = Literal["split", "pad", "drop", "error"]
_Item = TypeVar("_Item")

TAILS: tuple[Tail, ...] = ("split", "pad", "drop", "error")


class BatchIndices(list[int]):
    """Row ids of one batch, and what a collator must know beside them. Survives pickling and plain loaders."""

    bin_offsets: tuple[int, ...]
    """Boundaries of the bins inside the list: starts with 0, ends with the number of rows."""
    repeated: bool
    """The batch repeats rows of the epoch to even out the ranks: its labels must all be ignored."""

    def __init__(
        self, rows: Iterable[int], bin_offsets: Sequence[int] | None = None, repeated: bool = False
    ) -> None:
        super().__init__(rows)
        self.bin_offsets = (0, len(self)) if bin_offsets is None else tuple(bin_offsets)
        self.repeated = repeated

    @classmethod
    def of_bins(cls, bins: Iterable[Iterable[int]], repeated: bool = False) -> BatchIndices:
        """A batch of several bins."""
        rows: list[int] = []
        ends = [0]
        for content in bins:
            rows += content
            ends.append(len(rows))
        return cls(rows, ends, repeated)

    @property
    def bins(self) -> list[list[int]]:
        """Row ids of each bin."""
        return [self[a:b] for a, b in zip(self.bin_offsets[:-1], self.bin_offsets[1:], strict=True)]

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(self.bin_offsets) - 1

    def as_repeat(self) -> BatchIndices:
        """The same rows, marked so that they count for nothing."""
        return BatchIndices(self, self.bin_offsets, repeated=True)


def redeal(
    batches: Sequence[BatchIndices], num_replicas: int, length_of: Callable[[int], int]
) -> list[BatchIndices]:
    """Split fewer batches than ranks so that every rank gets some of their sequences.

    The heaviest part is halved until there are enough; a part is a subset of one batch, so capacity is kept. With fewer
    sequences than ranks the last ranks repeat the first ones' parts, marked as repeats.

    Args:
        batches: the batches of the last micro-step, 1..num_replicas.
        length_of: tokens of a row.

    Returns:
        One batch a rank.
    """
    parts = [batch.bins for batch in batches]
    heap = [(-_tokens(part, length_of), i) for i, part in enumerate(parts) if _num_rows(part) > 1]
    heapq.heapify(heap)
    while len(parts) < num_replicas and heap:
        i = heapq.heappop(heap)[1]
        parts[i], half = _halve(parts[i], length_of)
        parts.append(half)
        for j in (i, len(parts) - 1):
            if _num_rows(parts[j]) > 1:
                heapq.heappush(heap, (-_tokens(parts[j], length_of), j))
    dealt = [BatchIndices.of_bins(part) for part in parts]
    return dealt + [dealt[k % len(dealt)].as_repeat() for k in range(num_replicas - len(dealt))]


def _halve(part: list[list[int]], length_of: Callable[[int], int]) -> tuple[list[list[int]], list[list[int]]]:
    """Two halves of a part: whole bins where it has several, else the sequences of its bin."""
    if len(part) > 1:
        return _two_sums(part, lambda content: sum(map(length_of, content)))
    first, second = _two_sums(part[0], length_of)
    return [first], [second]


def _two_sums(items: list[_Item], weight: Callable[[_Item], int]) -> tuple[list[_Item], list[_Item]]:
    """Deal items, longest first, to the lighter of two sides, and keep their order inside each."""
    side = [0] * len(items)
    sums = [0, 0]
    counts = [0, 0]
    for i in sorted(range(len(items)), key=lambda i: -weight(items[i])):
        lighter = min((0, 1), key=lambda s: (sums[s], counts[s]))
        side[i] = lighter
        sums[lighter] += weight(items[i])
        counts[lighter] += 1
    return [x for x, s in zip(items, side, strict=True) if s == 0], [
        x for x, s in zip(items, side, strict=True) if s == 1
    ]


def _tokens(part: list[list[int]], length_of: Callable[[int], int]) -> int:
    return sum(length_of(row) for content in part for row in content)


def _num_rows(part: list[list[int]]) -> int:
    return sum(map(len, part))
