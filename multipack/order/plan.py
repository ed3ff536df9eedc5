"""The order of all bins of an epoch, planned window by window.

One rule: a plan depends on (lengths, capacity, seed, epoch, method) and never on ranks, so that every rank
can compute it alone and a run can resume on another number of ranks.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack import _core
from multipack.arguments import whole_number
from multipack.data.alignment import stored_lengths
from multipack.order.groups import Groups, as_groups
from multipack.order.packing import (
    PackMethod,
    as_lengths,
    check_lengths,
    checked_alignment,
    checked_capacity,
    pack,
    sequence_limit,
)

WINDOW_BINS = 8192
"""Bins of a window: the one bin a window leaves partly filled then costs less than 0.01 %."""

_CACHED_WINDOWS = 3
_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class WindowPlan:
    """Bins of one window: bin b holds rows `rows[offsets[b]:offsets[b + 1]]`."""

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """Tokens of each bin, slots of alignment included."""
    squares: NDArray[np.int64]
    """Sum of squared lengths of each bin, to which the work of attention is proportional; with alignment as
    well."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


class EpochPlan:
    """The bins of one epoch.

    The rows are permuted by `seed` and `epoch` and cut into windows, and each window is packed on its own:
    any bin is reached by planning one window. Only one count a window is kept, so a plan needs no memory to
    speak of.

    Args:
        lengths: token counts, shape [num_rows], any integer dtype, each in 1..capacity. Not copied.
        capacity: token slots of a bin.
        epoch, seed: name the permutation.
        shuffle: False keeps the order of rows: bins come in the order of their first row.
        method: as for `pack`; a callable is called once a window.
        window: bins of a window, about; None for 8192.
        shuffle_block: permute blocks of that many neighbours, for data sets on slow disks.
        max_sequences_per_bin: most sequences of a bin.
        together: one key a row, shape [num_rows]: rows with equal keys share a bin. The order, the windows
            and the bins are then those of groups, and a group's rows stay beside each other in their order in
            the source.
        align_to: a sequence takes a multiple of this many slots, as the collator's `align_to` lays it out;
            bins are packed by these.

    Raises:
        TypeError, ValueError: as `pack`; also an epoch below 0, a window or block below 1, or a capacity that
            is no multiple of `align_to`.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        capacity: int,
        *,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        method: PackMethod = "auto",
        window: int | None = None,
        shuffle_block: int = 1,
        max_sequences_per_bin: int | None = None,
        together: Groups | ArrayLike | None = None,
        align_to: int = 1,
    ) -> None:
        self.lengths = as_lengths(lengths)
        self.capacity = checked_capacity(capacity)
        self.align_to = checked_alignment(align_to, self.capacity)
        check_lengths(self.lengths, self.capacity)
        self.epoch = whole_number("epoch", epoch, 0)
        self.seed = whole_number("seed", seed)
        self.shuffle = bool(shuffle)
        self.method = method
        self.window_bins = WINDOW_BINS if window is None else whole_number("window", window, 1)
        self.shuffle_block = whole_number("shuffle_block", shuffle_block, 1)
        self.max_sequences_per_bin = (
            None if max_sequences_per_bin is None else sequence_limit(max_sequences_per_bin)
        )
        self.groups = None if together is None else as_groups(together)
        self._items, self._max_items = self._packed_items()
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self.num_slots = self._count_slots()
        self._digest: list[str] = []  # shared by the plans of all epochs
        window_tokens = self.window_bins * self.capacity
        self._edges = window_edges(len(self._items), self.num_slots, window_tokens, self.shuffle_block)
        # Invariant: _ends[w] is the exact number of bins before window w, for as many windows as were planned
        # in a row.
        self._ends = [0]
        self._cache: OrderedDict[int, WindowPlan] = OrderedDict()
        self._lock = threading.Lock()

    # The lock and the cache stay behind: workers plan their own windows.
    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_cache"] = OrderedDict()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def at_epoch(self, epoch: int) -> EpochPlan:
        """The plan of another epoch over the same lengths, which are not checked again."""
        other = EpochPlan.__new__(EpochPlan)
        other.__dict__.update(self.__dict__)
        other.epoch = whole_number("epoch", epoch, 0)
        other._ends = [0]
        other._cache = OrderedDict()
        other._lock = threading.Lock()
        return other

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_windows(self) -> int:
        """Windows that are packed on their own."""
        return len(self._edges) - 1

    def __len__(self) -> int:
        """Exact number of bins. Plans every window once, in parallel threads, and keeps the counts."""
        if len(self._ends) <= self.num_windows:
            missing = range(len(self._ends) - 1, self.num_windows)
            with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1), "multipack-plan") as threads:
                counts = list(threads.map(self._count, missing))
            with self._lock:  # a thread may be about to append the window it has planned
                self._ends[missing.start :] = itertools.accumulate(counts, initial=self._ends[missing.start])
        return self._ends[-1]

    @property
    def efficiency(self) -> float:
        """Share of token slots that hold a token, 0..1. Slots of alignment hold none."""
        return self.num_tokens / (len(self) * self.capacity) if self.num_rows else 0.0

    @property
    def min_bins(self) -> int:
        """ceil(slots / capacity): no plan needs fewer bins; known without planning."""
        return -(-self.num_slots // self.capacity)

    def has_bin(self, i: int) -> bool:
        """Whether bin `i` exists. Plans windows up to that bin only."""
        if i < self._ends[-1]:
            return True
        while i >= self._ends[-1] and len(self._ends) <= self.num_windows:
            self._window_of(len(self._ends) - 1)
        return i < self._ends[-1]

    def bins(self, start: int, stop: int) -> list[NDArray[np.int64]]:
        """Row ids of bins start..stop-1, fewer where the epoch ends before. Plans only the windows they lie
        in, and those before it whose number of bins is not yet known."""
        return [plan.rows[plan.offsets[b] : plan.offsets[b + 1]] for plan, b in self._locate(start, stop)]

    def ids(self, start: int, stop: int) -> list[list[int]]:
        """Bins start..stop-1 as batches carry them: Python's ints."""
        return [rows.tolist() for rows in self.bins(start, stop)]

    def costs(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and sums of squared lengths of bins start..stop-1, both of aligned lengths."""
        found = self._locate(start, stop)
        tokens = np.fromiter((plan.tokens[b] for plan, b in found), np.int64, len(found))
        squares = np.fromiter((plan.squares[b] for plan, b in found), np.int64, len(found))
        return tokens, squares

    def inputs(self) -> dict[str, Any]:
        """What the plan of any epoch depends on, as plain values; equal inputs give equal bins."""
        method = (
            self.method
            if isinstance(self.method, str)
            else getattr(self.method, "__qualname__", repr(type(self.method)))
        )
        if not self._digest:
            self._digest.append(digest_of(self.lengths))
        inputs = {
            "num_sequences": self.num_rows,
            "lengths": self._digest[0],
            "capacity": self.capacity,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "method": method,
            "window": self.window_bins,
            "shuffle_block": self.shuffle_block,
            "max_sequences_per_bin": self.max_sequences_per_bin,
            # Left out where it is 1, as in states that were saved before there was alignment.
            **({"align_to": self.align_to} if self.align_to > 1 else {}),
        }
        return inputs if self.groups is None else {**inputs, "together": self.groups.digest()}

    @property
    def fingerprint(self) -> str:
        """The inputs and the epoch as canonical JSON."""
        return json.dumps({**self.inputs(), "epoch": self.epoch}, sort_keys=True)

    def _packed_items(self) -> tuple[NDArray[Any], int | None]:
        """Tokens of what is packed, rows or groups, and how many of these a bin may hold."""
        if self.groups is None:
            return self.lengths, self.max_sequences_per_bin
        tokens = self.groups.tokens(self._stored(self.lengths))
        self.groups.check_tokens(tokens, self.capacity)
        return tokens.astype(np.int32), self.groups.limit(self.max_sequences_per_bin)

    def _stored(self, lengths: NDArray[Any]) -> NDArray[Any]:
        """Slots of sequences of these lengths, int32 where they are aligned."""
        return lengths if self.align_to == 1 else stored_lengths(lengths.astype(np.int32), self.align_to)

    def _count_slots(self) -> int:
        """Slots of all sequences, 64-bit."""
        blocks = range(0, self.num_rows if self.align_to > 1 else 0, 1 << 20)
        sums = (self._stored(self.lengths[start : start + (1 << 20)]).sum(dtype=np.int64) for start in blocks)
        return sum(map(int, sums)) if self.align_to > 1 else self.num_tokens

    def _window_of(self, w: int) -> WindowPlan:
        """The plan of window `w`, from the cache or made now. Threads may plan the same window twice, never
        half."""
        with self._lock:
            plan = self._cache.get(w)
            if plan is not None:
                self._cache.move_to_end(w)
        if plan is None:
            plan = self._plan_window(w)
        with self._lock:
            self._cache[w] = plan
            while len(self._cache) > _CACHED_WINDOWS:
                self._cache.popitem(last=False)
            if len(self._ends) == w + 1:
                self._ends.append(self._ends[w] + len(plan))
        return plan

    def _window_items(self, w: int) -> NDArray[np.int64]:
        start, stop = self._edges[w], self._edges[w + 1]
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        rows = np.empty(stop - start, np.int64)
        seed = window_seed(self.seed, self.epoch, 0)
        _core.permuted_rows(len(self._items), self.shuffle_block, seed, start, rows)
        return rows

    def _pack_window(self, w: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Bin ends, rows or groups, and their tokens, in the order of bins of an epoch."""
        items = self._window_items(w)
        tokens = self._stored(self._items[items]).astype(np.int32, copy=False)
        packing = pack(
            tokens,
            self.capacity,
            method=self.method,
            seed=window_seed(self.seed, self.epoch, w + 1),
            max_sequences_per_bin=self._max_items,
        )
        offsets, order = packing.offsets, packing.indices
        if not self.shuffle:
            first = np.minimum.reduceat(order, offsets[:-1])
            offsets, order = _reorder(offsets, order, np.argsort(first, kind="stable"))
        else:  # whatever the method, the place of a bin says nothing about its content
            _core.shuffle_bins(window_seed(self.seed, self.epoch, -w - 1), offsets, order)
        return offsets, items[order], tokens[order]

    def _count(self, w: int) -> int:
        plan = self._cache.get(w)
        return len(plan) if plan is not None else len(self._pack_window(w)[0]) - 1

    def _plan_window(self, w: int) -> WindowPlan:
        offsets, rows, lengths = self._pack_window(w)
        if self.groups is not None:
            offsets, rows = self.groups.expand(offsets, rows)
            lengths = self._stored(self.lengths[rows])
        wide = lengths.astype(np.int64)
        tokens = np.add.reduceat(wide, offsets[:-1])
        squares = np.add.reduceat(wide * wide, offsets[:-1])
        return WindowPlan(offsets, rows, tokens, squares)

    def _locate(self, start: int, stop: int) -> list[tuple[WindowPlan, int]]:
        """(window plan, bin inside it) of bins start..stop-1 that exist."""
        if start < 0:
            raise ValueError(f"bin {start} is below 0.")
        found: list[tuple[WindowPlan, int]] = []
        position = start
        while position < stop and self.has_bin(position):
            w = bisect.bisect_right(self._ends, position) - 1
            plan, first = self._window_of(w), self._ends[w]
            last = min(stop, self._ends[w + 1])
            found += [(plan, b) for b in range(position - first, last - first)]
            position = last
        return found


def digest_of(lengths: NDArray[Any]) -> str:
    """Digest of lengths that does not depend on their dtype."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(lengths), 1 << 20):
        digest.update(lengths[start : start + (1 << 20)].astype("<i4").tobytes())
    return digest.hexdigest()


def window_edges(num_items: int, num_tokens: int, window_tokens: int, block: int) -> list[int]:
    """Positions of rows or groups where windows start, and their number: windows of nearly equal size, at
    multiples of the block."""
    if num_items == 0:
        return [0]
    items_per_window = max(1, round(window_tokens * num_items / max(num_tokens, 1)))
    num_windows = max(1, round(num_items / items_per_window))
    edges = {min(num_items, num_items * w // num_windows // block * block) for w in range(num_windows)}
    return [*sorted(edges), num_items]


def window_seed(seed: int, epoch: int, salt: int) -> int:
    """A 64-bit seed of three numbers; the kernels scramble it further."""
    return ((seed + 1) * _MIX + epoch * 0xBF58476D1CE4E5B9 + salt * 0x94D049BB133111EB) % 2**64


def _reorder(
    offsets: NDArray[np.int64], rows: NDArray[Any], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The same bins in another order."""
    sizes = np.diff(offsets)[order]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    positions = np.repeat(offsets[:-1][order] - ends[:-1], sizes) + np.arange(len(rows))
    return ends, rows[positions]


__all__: Sequence[str] = ["WINDOW_BINS", "EpochPlan", "WindowPlan"]
