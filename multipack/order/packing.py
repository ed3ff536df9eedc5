"""Group sequences into bins of at most `capacity` tokens.

A pure function of its arguments: no global random numbers, the same bins on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack import _core
from multipack.arguments import whole_number
from multipack.order.groups import Groups, as_groups

MAX_CAPACITY: int = _core.MAX_CAPACITY
"""Largest capacity in tokens: the packers keep tables of that many entries."""

_NO_LIMIT = int(np.iinfo(np.int64).max)

Packer: TypeAlias = Callable[[NDArray[np.int32], int], tuple[ArrayLike, ArrayLike]]
"""A packer of the user's own: `(lengths, capacity) -> (offsets, indices)`."""

MethodName: TypeAlias = Literal["auto", "stream", "best_fit_decreasing", "next_fit", "fewest"]
PackMethod: TypeAlias = MethodName | Packer

_KERNELS: dict[str, Any] = {
    "auto": _core.pack_auto,
    "stream": _core.stream,
    "best_fit_decreasing": _core.best_fit_decreasing,
    "next_fit": _core.next_fit,
    "fewest": _core.pack_fewest,
}


@dataclass(frozen=True)
class Packing:
    """Bins as flat arrays: bin b holds rows `indices[offsets[b]:offsets[b + 1]]`."""

    offsets: NDArray[np.int64]
    """Bin ends, shape [num_bins + 1]."""
    indices: NDArray[np.int32]
    """Row ids, shape [num_sequences]; each row once."""
    lengths: NDArray[np.int32]
    """The lengths that were packed, shape [num_sequences]."""
    capacity: int
    """Token slots of a bin."""
    max_sequences_per_bin: int | None = None
    """Most sequences of a bin; None for no limit."""
    groups: Groups | None = None
    """Rows that share a bin, if any had to."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, b: int) -> NDArray[np.int32]:
        """Row ids of bin `b`."""
        if not -len(self) <= b < len(self):
            raise IndexError(f"bin {b} of {len(self)} bins")
        b %= len(self)
        return self.indices[self.offsets[b] : self.offsets[b + 1]]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens in all bins."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """Share of token slots that hold a token, 0..1. Next-fit on typical text gives 0.9; expect above
        0.999."""
        return self.num_tokens / (len(self) * self.capacity) if len(self) else 0.0

    @cached_property
    def lower_bound(self) -> int:
        """No packing uses fewer bins: the largest of ceil(tokens / capacity), the Martello-Toth bound L2
        (Knapsack Problems, 1990) and bounds by dual feasible functions, which see that a bin of 384 tokens
        holds three sequences of 100 to 128 but only two of 129 or more. Groups count as one sequence each.
        When `len` equals it, the packing is optimal."""
        if self.groups is None:
            return lower_bound(self.lengths, self.capacity, self.max_sequences_per_bin)
        limit = self.groups.limit(self.max_sequences_per_bin)
        return lower_bound(self.groups.tokens(self.lengths), self.capacity, limit)


def pack(
    lengths: ArrayLike,
    capacity: int,
    *,
    method: PackMethod = "auto",
    seed: int = 0,
    max_sequences_per_bin: int | None = None,
    together: Groups | ArrayLike | None = None,
) -> Packing:
    """Group sequences into bins of at most `capacity` tokens.

    Args:
        lengths: token counts, shape [num_sequences], any integer dtype, each in 1..capacity.
        capacity: token slots of a bin, at most 2^24.
        method: "stream" keeps the given order up to a small delay and still fills nearly every bin to the
            last token; "best_fit_decreasing" sorts (Johnson 1973); "next_fit" keeps the order exactly and
            wastes most; "auto" takes the stream, and sorts where that needs clearly fewer bins; "fewest"
            starts with what "auto" gives and, for up to 4096 sequences, searches some milliseconds for fewer
            bins. A callable `(lengths, capacity) -> (offsets, indices)` is a packer of your own; its answer
            is checked.
        seed: breaks ties, such as which of two rows of the same length is taken.
        max_sequences_per_bin: most sequences of a bin. With groups it is kept as if each were as large as the
            largest.
        together: one key a row, shape [num_sequences]: rows with equal keys share a bin. Groups are packed as
            sequences of all their tokens.

    Returns:
        The bins, in the order in which the method made them.

    Raises:
        TypeError: lengths are not whole numbers.
        ValueError: a length, or what a group holds, is outside 1..capacity (the message names the first such
            row or group and the remedies), or a callable lost, repeated or overfilled something.
    """
    if together is not None:
        return _pack_groups(
            lengths,
            capacity,
            as_groups(together),
            method,
            seed=seed,
            max_sequences_per_bin=max_sequences_per_bin,
        )
    checked = as_lengths(lengths)
    capacity = checked_capacity(capacity)
    check_lengths(checked, capacity)
    limit = sequence_limit(max_sequences_per_bin)
    seed = whole_number("seed", seed)
    # A copy, so that no one changes it while it is packed, or afterwards.
    small = np.array(checked, np.int32)
    if small.size >= 2**31:
        raise ValueError(
            f"{small.size} sequences cannot be packed in one call, at most 2^31 - 1. EpochPlan packs in "
            "windows."
        )
    if callable(method):
        offsets, indices = _call_packer(method, small, capacity, limit)
    else:
        if method not in _KERNELS:
            raise ValueError(
                f"method {method!r} is none of {', '.join(get_args(MethodName))}, nor a callable."
            )
        ends = np.empty(small.size + 1, np.int64)
        indices = np.empty(small.size, np.int32)
        num_bins = _KERNELS[method](small, capacity, limit, seed % 2**64, ends, indices)
        offsets = ends[: num_bins + 1].copy()
    return Packing(offsets, indices, small, capacity, max_sequences_per_bin)


def _pack_groups(
    lengths: ArrayLike,
    capacity: int,
    groups: Groups,
    method: PackMethod,
    *,
    seed: int,
    max_sequences_per_bin: int | None,
) -> Packing:
    checked = as_lengths(lengths)
    capacity = checked_capacity(capacity)
    check_lengths(checked, capacity)
    tokens = groups.tokens(checked)
    groups.check_tokens(tokens, capacity)
    limit = groups.limit(None if max_sequences_per_bin is None else sequence_limit(max_sequences_per_bin))
    bins = pack(tokens, capacity, method=method, seed=seed, max_sequences_per_bin=limit)
    offsets, rows = groups.expand(bins.offsets, bins.indices)
    small = np.array(checked, np.int32)
    return Packing(offsets, rows.astype(np.int32), small, capacity, max_sequences_per_bin, groups)


def lower_bound(lengths: ArrayLike, capacity: int, max_sequences_per_bin: int | None = None) -> int:
    """No packing of `lengths` uses fewer bins than this; see `Packing.lower_bound`."""
    checked = as_lengths(lengths)
    capacity = checked_capacity(capacity)
    check_lengths(checked, capacity)
    counts = np.bincount(checked, minlength=capacity + 1).astype(np.int64)
    return int(_core.lower_bound(counts, capacity, sequence_limit(max_sequences_per_bin)))


def as_lengths(lengths: ArrayLike) -> NDArray[Any]:
    """One-dimensional integer array of `lengths`, in the dtype it came in.

    Raises:
        TypeError: the values are not whole numbers.
        ValueError: the array has more than one dimension.
    """
    array = np.asarray(lengths)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.ndim != 1:
        raise ValueError(
            f"lengths must be one-dimensional, one token count a row, not of shape {array.shape}."
        )
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"lengths must be whole numbers, not {array.dtype}: row 0 is {array[0]!r}. Pass token counts, "
            "such as [len(row) for row in rows]."
        )
    return array


def checked_capacity(capacity: int) -> int:
    """The capacity, which must be a whole number in 1..2^24."""
    tokens = whole_number("capacity", capacity)
    if not 1 <= tokens <= MAX_CAPACITY:
        raise ValueError(f"capacity is {tokens} tokens, outside 1..{MAX_CAPACITY}: no bin could be filled.")
    return tokens


def checked_alignment(align_to: int, capacity: int) -> int:
    """The alignment, which must divide the capacity."""
    slots = whole_number("align_to", align_to, 1)
    if capacity % slots:
        smaller = capacity // slots * slots
        raise ValueError(
            f"capacity is {capacity} tokens, no multiple of align_to = {slots}: {capacity - smaller} slots "
            f"of every bin could hold no sequence. Use a capacity of {smaller or slots} or "
            f"{smaller + (slots if smaller else 2 * slots)}."
        )
    return slots


def check_lengths(lengths: NDArray[Any], capacity: int) -> None:
    """Refuse lengths outside 1..capacity, naming the first such row."""
    if lengths.size == 0:
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1:
        row = int(np.argmax(lengths < 1))
        raise ValueError(
            f"row {row} has length {int(lengths[row])}, below 1: it would be a sequence without tokens. "
            "Leave such rows out; TokenDataset does."
        )
    if high > capacity:
        over = lengths > capacity
        row = int(np.argmax(over))
        raise ValueError(
            f"row {row} has {int(lengths[row])} tokens, above the capacity of {capacity}; {int(over.sum())} "
            f"rows are too long, the longest has {high}. They fit no bin: raise the capacity, or pass "
            f"max_length={capacity} with overlong='truncate', 'split' or 'drop' to TokenDataset."
        )


def sequence_limit(max_sequences_per_bin: int | None) -> int:
    """Most sequences of a bin, for the kernels, which know no None."""
    if max_sequences_per_bin is None:
        return _NO_LIMIT
    limit = whole_number("max_sequences_per_bin", max_sequences_per_bin)
    if limit < 1:
        raise ValueError(
            f"max_sequences_per_bin is {limit}, below 1: no bin could hold a sequence. Use None for no limit."
        )
    return limit


def _call_packer(
    packer: Packer, lengths: NDArray[np.int32], capacity: int, limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Run a packer of the user's own and check its answer."""
    name = getattr(packer, "__name__", type(packer).__name__)
    raw_offsets, raw_indices = packer(lengths, capacity)
    offsets, indices = np.asarray(raw_offsets), np.asarray(raw_indices)
    if lengths.size == indices.size == 0:
        indices = indices.astype(np.int64)  # an empty list has no type of its own
    if (
        offsets.dtype.kind not in "iu"
        or indices.dtype.kind not in "iu"
        or offsets.ndim != 1
        or indices.ndim != 1
    ):
        raise TypeError(f"packer {name} must return two one-dimensional integer arrays, offsets and indices.")
    offsets = offsets.astype(np.int64)
    if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != indices.size or (np.diff(offsets) < 1).any():
        raise ValueError(
            f"packer {name} returned offsets that do not cut its {indices.size} indices into bins: they must "
            f"start with 0, rise, and end with {indices.size}."
        )
    _check_each_row_once(name, indices, lengths.size)
    used = (
        np.add.reduceat(lengths[indices].astype(np.int64), offsets[:-1])
        if lengths.size
        else np.empty(0, np.int64)
    )
    if (used > capacity).any():
        b = int(np.argmax(used > capacity))
        raise ValueError(
            f"packer {name} overfilled bin {b}: {int(used[b])} tokens, above the capacity of {capacity}."
        )
    if (np.diff(offsets) > limit).any():
        b = int(np.argmax(np.diff(offsets) > limit))
        raise ValueError(
            f"packer {name} put {int(np.diff(offsets)[b])} sequences into bin {b}, above the limit of "
            f"{limit}."
        )
    return offsets, indices.astype(np.int32)


def _check_each_row_once(name: str, indices: NDArray[Any], num_rows: int) -> None:
    if indices.size and (indices.min() < 0 or indices.max() >= num_rows):
        row = int(indices[(indices < 0) | (indices >= num_rows)][0])
        raise ValueError(f"packer {name} returned row {row}, outside 0..{num_rows - 1}.")
    times = np.bincount(indices, minlength=num_rows)
    if (times == 0).any():
        raise ValueError(
            f"packer {name} lost row {int(np.argmax(times == 0))}: every row must be in exactly one bin."
        )
    if (times > 1).any():
        row = int(np.argmax(times > 1))
        raise ValueError(
            f"packer {name} repeated row {row} {int(times[row])} times: every row must be in exactly one bin."
        )
