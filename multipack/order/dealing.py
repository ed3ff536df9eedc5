"""Deal the batches of an order to ranks.

Every rank computes the same dealing from the same numbers and takes its own share, so no rank ever talks to
another and all have the same number of batches: a rank that took an extra step would deadlock the others.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from multipack.arguments import check_choice, whole_number
from multipack.order.balance import BALANCE_MODES, BalanceMode, deal
from multipack.order.batch import BatchIndices, LeftOut, Place
from multipack.order.orders import Order, count_batches

Tail: TypeAlias = Literal["split", "pad", "drop", "error"]
_Item = TypeVar("_Item")
_Bin: TypeAlias = list[list[int]]  # units of rows that stay together

_logger = logging.getLogger(__name__)

TAILS: tuple[Tail, ...] = ("split", "pad", "drop", "error")


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """One rank's share of an order; arguments as of DistributedBatchSampler."""

    num_replicas: int = 1
    rank: int = 0
    tail: Tail = "split"
    accumulate: int = 1
    balance: BalanceMode = "none"
    balance_window: int = 1
    hidden_size: int = 4096

    def __post_init__(self) -> None:
        check_choice("tail", self.tail, TAILS)
        check_choice("balance", self.balance, BALANCE_MODES)
        for name in ("accumulate", "balance_window", "hidden_size"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        if self.balance == "none" and self.balance_window > 1:
            raise ValueError(
                f"balance_window is {self.balance_window} but balance is 'none': choose 'micro_step' or "
                "'step'."
            )

    @property
    def group_steps(self) -> int:
        """Micro-steps among which batches are dealt."""
        return self.accumulate * self.balance_window

    @property
    def group(self) -> int:
        """Global batches that are dealt together."""
        return self.num_replicas * self.group_steps

    def micro_steps(self, num_batches: int) -> int:
        """Micro-steps that so many global batches give."""
        whole, rest = divmod(num_batches, self.num_replicas)
        return whole + (rest > 0 and self.tail != "drop")

    def optimizer_steps(self, num_batches: int) -> int:
        """Optimizer steps that so many global batches give."""
        return -(-self.micro_steps(num_batches) // self.accumulate)

    def remaining(self, order: Order, place: Place) -> int:
        """Micro-steps of the epoch from `place` on."""
        return self.micro_steps(len(order) - place.batches) - place.micro_steps

    def has_more(self, order: Order, place: Place) -> bool:
        """Whether a micro-step begins at `place`; plans no further than its batches."""
        first = place.batches + place.micro_steps * self.num_replicas
        return order.has(first + self.num_replicas - 1 if self.tail == "drop" else first)

    def after(self, order: Order, place: Place, steps: int = 1) -> Place:
        """Where a run resumes `steps` micro-steps after `place`: behind the last one the next epoch
        begins."""
        if self.balance == "none":  # any micro-step is a place in the global order
            moved = Place(place.epoch, place.batches + steps * self.num_replicas)
        else:
            groups, micro_steps = divmod(place.micro_steps + steps, self.group_steps)
            moved = Place(place.epoch, place.batches + groups * self.group, micro_steps)
        return moved if self.has_more(order, moved) else Place(place.epoch + 1)

    def read(self, order: Order, place: Place) -> Iterator[BatchIndices]:
        """This rank's batches of the epoch from `place` on, each with its mark."""
        self.check_tail(order, place.batches)
        start, step = place.batches, place.micro_steps
        while count := count_batches(order, start, self.group):
            dealt, left = self._deal_group(order, start, count)
            start += count
            for batch in self._share(order, dealt, left, step):
                batch.after = place = self.after(order, place)
                if batch.ends_epoch:
                    batch.left_out = self._sizes(order, [*left, *range(start, len(order))])
                    self._report(order.epoch, batch.left_out)
                yield batch
            step = 0

    def step(self, order: Order, step: int) -> list[list[BatchIndices]]:
        """Batches of an optimizer step by micro-step and rank, counted from the start of the epoch; none
        behind its end."""
        window, inside = divmod(step, self.balance_window)
        start = window * self.group
        count = count_batches(order, start, self.group)
        if not count:
            return []
        dealt, left = self._deal_group(order, start, count)
        first = inside * self.accumulate
        found = [[order.batch(int(i)) for i in ranks] for ranks in dealt[first : first + self.accumulate]]
        if left and self.tail == "error":
            self.check_tail(order)
        if left and self.tail != "drop" and first <= len(dealt) < first + self.accumulate:
            found.append(self._last(order, [order.batch(i) for i in left], range(self.num_replicas)))
        return found

    def batches_of(self, order: Order, steps: Collection[int]) -> list[tuple[int, int]]:
        """Global batches first..stop-1 of optimizer steps, counted from the start of the epoch.

        Raises:
            ValueError: there is no such step, or only some of the steps among which batches are dealt are
                given.
        """
        ranges = []
        for window in sorted({step // self.balance_window for step in steps}):
            start = window * self.group
            count = count_batches(order, start, self.group)
            first = window * self.balance_window
            held = set(range(first, first + self.optimizer_steps(count)))
            asked = {step for step in steps if step // self.balance_window == window}
            if asked - held:
                raise ValueError(
                    f"epoch {order.epoch} has no step {min(asked - held)}: it has "
                    f"{self.optimizer_steps(len(order))} optimizer steps, from 0."
                )
            if held - asked:
                raise ValueError(
                    f"balance_window={self.balance_window} deals batches among steps {min(held)} to "
                    f"{max(held)}, so step {min(held - asked)} cannot stay without the others: name all of "
                    "them, or use balance_window=1."
                )
            ranges.append((start, start + count))
        return ranges

    def check_tail(self, order: Order, start: int = 0) -> None:
        """Refuse, under "error", batches from `start` on that do not fill a last micro-step."""
        if self.tail == "error" and (left := (len(order) - start) % self.num_replicas):
            raise ValueError(
                f"{len(order) - start} batches cannot be dealt to {self.num_replicas} ranks evenly: {left} "
                "are left over, and tail is 'error'. Use tail='split', 'pad' or 'drop', or a number of "
                "ranks that divides them."
            )

    def check_not_empty(self, order: Order) -> None:
        """Refuse to deal nothing: a rank without a batch would train zero steps, and look as if all went
        well."""
        self.check_tail(order)
        if self.has_more(order, Place(order.epoch)):
            return
        if not len(order):
            raise ValueError(f"{order}: there is nothing to train on. Check the data set and the batch size.")
        raise ValueError(
            f"{order}: too few to give {self.num_replicas} ranks (accumulate={self.accumulate}) a batch each "
            f"with tail={self.tail!r}, so every rank would train zero steps. Use at most {len(order)} ranks, "
            "a smaller capacity or batch, or tail='split'."
        )

    def _deal_group(self, order: Order, start: int, count: int) -> tuple[NDArray[np.int64], list[int]]:
        """Batches of each micro-step and rank of the group that begins at `start`, and those that fill
        none."""
        if self.balance == "none":
            whole = count // self.num_replicas * self.num_replicas
            dealt = np.arange(start, start + whole).reshape(-1, self.num_replicas)
            return dealt, list(range(start + whole, start + count))
        costs = order.costs(start, start + count, self.hidden_size)
        options = {"accumulate": self.accumulate, "window": self.balance_window}
        dealt = start + deal(costs, self.num_replicas, self.balance, **options)
        used = set(dealt.ravel().tolist())
        return dealt, [i for i in range(start, start + count) if i not in used]

    def _share(
        self, order: Order, dealt: NDArray[np.int64], left: list[int], first_step: int
    ) -> Iterator[BatchIndices]:
        """This rank's batches of a group from `first_step` on."""
        for step in range(first_step, len(dealt)):
            yield order.batch(int(dealt[step, self.rank]))
        if left and self.tail != "drop":
            yield from self._last(order, [order.batch(i) for i in left], [self.rank])

    def _last(self, order: Order, left: list[BatchIndices], ranks: Sequence[int]) -> list[BatchIndices]:
        """The shares of `ranks` of batches that do not fill a micro-step."""
        if self.tail == "split":
            dealt = redeal(left, self.num_replicas, order.length_of)
            return [dealt[rank] for rank in ranks]
        spare = len(left)
        return [left[r] if r < spare else order.early(r - spare).as_repeat() for r in ranks]

    def left_out(self, order: Order) -> LeftOut:
        """Sequences and tokens that an epoch leaves out, over all ranks."""
        start = len(order) // self.group * self.group
        left = self._deal_group(order, start, len(order) - start)[1] if start < len(order) else []
        return self._sizes(order, left)

    def _sizes(self, order: Order, left: list[int]) -> LeftOut:
        """Sizes of the batches that tail="drop" leaves out, and of what `drop_last` does."""
        found = [order.left_out]
        if self.tail == "drop":
            found += [order.size_of(order.batch(i)) for i in left]
        return LeftOut(sum(size.sequences for size in found), sum(size.tokens for size in found))

    def _report(self, epoch: int, left_out: LeftOut) -> None:
        if self.rank == 0 and left_out.sequences:
            _logger.warning(
                "epoch %d leaves out %d sequences of %d tokens, which fill no last batch on every rank "
                "(drop_last, tail='drop'). tail='split' and drop_last=False use them.",
                epoch,
                left_out.sequences,
                left_out.tokens,
            )


def redeal(
    batches: Sequence[BatchIndices], num_replicas: int, length_of: Callable[[int], int]
) -> list[BatchIndices]:
    """Split fewer batches than ranks so that every rank gets some of their sequences.

    The heaviest part is halved until there are enough; a part is a subset of one batch, so capacity is kept,
    and a group stays whole. With fewer sequences (or groups) than ranks the last ranks repeat the first ones'
    parts, marked as repeats.

    Args:
        batches: the batches of the last micro-step, 1..num_replicas.
        length_of: tokens of a row.

    Returns:
        One batch a rank.
    """
    group_of = {row: g for batch in batches for row, g in zip(batch, batch.groups or (), strict=False)}
    parts = [[_units(content, group_of) for content in batch.bins] for batch in batches]
    heap = [(-_tokens(part, length_of), i) for i, part in enumerate(parts) if _num_units(part) > 1]
    heapq.heapify(heap)
    while len(parts) < num_replicas and heap:
        i = heapq.heappop(heap)[1]
        parts[i], half = _halve(parts[i], length_of)
        parts.append(half)
        for j in (i, len(parts) - 1):
            if _num_units(parts[j]) > 1:
                heapq.heappush(heap, (-_tokens(parts[j], length_of), j))
    capacity = batches[0].bin_capacity
    dealt = [
        BatchIndices.of_bins((chain.from_iterable(content) for content in part), bin_capacity=capacity)
        for part in parts
    ]
    if batches[0].groups is not None:
        for batch in dealt:
            batch.groups = tuple(group_of[row] for row in batch)
    return dealt + [dealt[k % len(dealt)].as_repeat() for k in range(num_replicas - len(dealt))]


def _units(content: list[int], group_of: dict[int, int]) -> _Bin:
    """The rows of a bin that cannot be parted, which lie beside each other: groups, or single rows."""
    if not group_of:
        return [[row] for row in content]
    return [list(rows) for _, rows in groupby(content, group_of.__getitem__)]


def _halve(part: list[_Bin], length_of: Callable[[int], int]) -> tuple[list[_Bin], list[_Bin]]:
    """Two halves of a part: whole bins where it has several, else the units of its bin."""
    if len(part) > 1:
        return _two_sums(part, lambda content: _tokens([content], length_of))
    first, second = _two_sums(part[0], lambda unit: sum(map(length_of, unit)))
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


def _tokens(part: list[_Bin], length_of: Callable[[int], int]) -> int:
    return sum(length_of(row) for content in part for unit in content for row in unit)


def _num_units(part: list[_Bin]) -> int:
    return sum(map(len, part))
