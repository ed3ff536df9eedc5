"""Concat-and-chunk: documents laid end to end in a seeded order, and cut into bins of equal size.

One rule: a bin is a range of that one long sequence of tokens. It needs the sum of the lengths before it and
nothing else, so any bin can be had without the bins before, and no token is lost or comes twice.

Documents of 6 and 3 tokens, capacity 4, in the order of rows:
```
document   0   0   0   0   0   0   1   1   1
bin        0               1               2
fragments  (0, 0, 4)       (0, 4, 2) (1, 0, 2)   (1, 2, 1)      row, first token, tokens
```
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack import _core
from multipack.arguments import check_choice, whole_number
from multipack.data.part import Part
from multipack.order.groups import Groups
from multipack.order.packing import as_lengths, checked_capacity
from multipack.order.plan import WINDOW_BINS, digest_of, window_edges, window_seed

Boundaries = Literal["document", "bin"]

_CACHED_WINDOWS = 8
_AT_ONCE = 64
"""Windows that are summed at once on the way to a bin far ahead."""
_CHUNK_SALT = 1 << 40
"""Salts of the seeds that shuffle bins; those of documents count from 0."""


class Fragments(NamedTuple):
    """What a bin holds, in order: of each row a run of its tokens. int64 arrays of one number a fragment."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    """First token of the run in its row."""
    lengths: NDArray[np.int64]


class _Window(NamedTuple):
    """Neighbours in the order of rows, and where each of them ends among the tokens of the window."""

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]


class ConcatPlan:
    """The bins of one epoch, each full but the last.

    Args:
        lengths: token counts, shape [num_rows], any integer dtype, each at least 1, also above the capacity.
            Not copied.
        capacity: tokens of a bin.
        epoch, seed: name the order of rows and of bins.
        shuffle: False keeps the order of rows, and bins as they come.
        boundaries: what attention and positions know of: each "document" alone, or the "bin" as one sequence.
            Changes `costs` alone.
        window: bins among which bins are shuffled, about; None for 8192. Neighbours in a document are then
            far apart in an epoch, as Megatron's shuffle index and OLMo-core's have it.
        shuffle_block: permute blocks of that many neighbouring rows, for data sets on slow disks.

    A row of n tokens is in up to ceil(n / capacity) + 1 bins. One sum a window is kept; reaching a bin needs
    the lengths of all rows before it once, 10 to 20 ns each.

    Raises:
        TypeError: the lengths are no whole numbers.
        ValueError: a length is below 1, or an argument is out of range.
    """

    groups: Groups | None = None
    """Rows that must stay together: none, for any row may be cut."""

    def __init__(
        self,
        lengths: ArrayLike,
        capacity: int,
        *,
        epoch: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        boundaries: Boundaries = "document",
        window: int | None = None,
        shuffle_block: int = 1,
    ) -> None:
        self.lengths = as_lengths(lengths)
        self.capacity = checked_capacity(capacity)
        _check_not_empty(self.lengths)
        self.epoch = whole_number("epoch", epoch, 0)
        self.seed = whole_number("seed", seed)
        self.shuffle = bool(shuffle)
        check_choice("boundaries", boundaries, get_args(Boundaries))
        self.boundaries = boundaries
        self.window_bins = WINDOW_BINS if window is None else whole_number("window", window, 1)
        self.shuffle_block = whole_number("shuffle_block", shuffle_block, 1)
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        self._digest: list[str] = []  # shared by the plans of all epochs
        self._edges = window_edges(
            self.num_rows, self.num_tokens, self.window_bins * self.capacity, self.shuffle_block
        )
        self._start_afresh()

    def _start_afresh(self) -> None:
        # Invariant: _before[w] is the number of tokens before window w, for as many windows as were summed in
        # a row.
        self._before = [0]
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._orders: OrderedDict[int, NDArray[np.int32]] = OrderedDict()
        self._lock = threading.Lock()

    # The lock and what is cached stay behind: workers compute their own windows.
    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        for name in ("_before", "_windows", "_orders", "_lock"):
            del kept[name]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_afresh()

    def at_epoch(self, epoch: int) -> ConcatPlan:
        """The plan of another epoch over the same lengths, which are not checked again."""
        other = ConcatPlan.__new__(ConcatPlan)
        other.__dict__.update(self.__dict__)
        other.epoch = whole_number("epoch", epoch, 0)
        other._start_afresh()
        return other

    @property
    def num_rows(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    def __len__(self) -> int:
        """Exact number of bins, ceil(tokens / capacity). Nothing is planned."""
        return (self.num_tokens + self.capacity - 1) // self.capacity

    @property
    def efficiency(self) -> float:
        """Share of token slots that hold a token, 0..1."""
        return self.num_tokens / (len(self) * self.capacity) if self.num_rows else 0.0

    @property
    def min_bins(self) -> int:
        """ceil(tokens / capacity): fewest bins possible."""
        return len(self)

    def has_bin(self, i: int) -> bool:
        """Whether bin `i` exists."""
        return i < len(self)

    def bins(self, start: int, stop: int) -> list[Fragments]:
        """Contents of bins start..stop-1, fewer where the epoch ends before."""
        if start < 0:
            raise ValueError(f"bin {start} is below 0.")
        return [self._bin(i) for i in range(start, min(stop, len(self)))]

    def ids(self, start: int, stop: int) -> list[list[int]]:
        """Bins start..stop-1 as batches carry them: each fragment is a `Part`, a row id that knows its
        tokens."""
        return [
            [Part(*part) for part in zip(*map(np.ndarray.tolist, content), strict=True)]
            for content in self.bins(start, stop)
        ]

    def costs(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of bins start..stop-1, and sums of the squared lengths that attention sees."""
        bins = self.bins(start, stop)
        tokens = np.fromiter((content.lengths.sum() for content in bins), np.int64, len(bins))
        if self.boundaries == "bin":
            return tokens, tokens * tokens
        return tokens, np.fromiter(
            (content.lengths @ content.lengths for content in bins), np.int64, len(bins)
        )

    def inputs(self) -> dict[str, Any]:
        """What the plan of any epoch depends on, as plain values; equal inputs give equal bins."""
        if not self._digest:
            self._digest.append(digest_of(self.lengths))
        return {
            "num_sequences": self.num_rows,
            "lengths": self._digest[0],
            "capacity": self.capacity,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "method": "concat",
            "window": self.window_bins,
            "shuffle_block": self.shuffle_block,
        }

    def _bin(self, i: int) -> Fragments:
        first = self._chunk(i) * self.capacity
        last = min(first + self.capacity, self.num_tokens)
        parts = list(self._fragments(first, last))
        if len(parts) == 1:
            return parts[0]
        return Fragments(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _chunk(self, i: int) -> int:
        """Which range of the tokens bin `i` is: bins are shuffled inside windows of them."""
        if not self.shuffle:
            return i
        w, place = divmod(i, self.window_bins)
        first = w * self.window_bins
        with self._lock:
            order = self._orders.get(w)
        if order is None:
            order = np.arange(min(self.window_bins, len(self) - first), dtype=np.int32)
            seed = window_seed(self.seed, self.epoch, _CHUNK_SALT + w)
            _core.shuffle_bins(seed, np.arange(len(order) + 1), order)
            with self._lock:
                _remember(self._orders, w, order)
        return first + int(order[place])

    def _fragments(self, first: int, last: int) -> Iterator[Fragments]:
        """Tokens first..last-1 of the epoch, window by window."""
        w = self._window_at(first)
        while first < last:
            window, before = self._window(w), self._before[w]
            stop = min(last, before + int(window.ends[-1]))
            yield _cut(window, first - before, stop - before)
            first, w = stop, w + 1
            if first < last:
                self._window_at(first)

    def _window_at(self, token: int) -> int:
        """The window that holds a token of the epoch; sums the windows before it where they are not yet
        summed."""
        while self._before[-1] <= token:
            known = len(self._before) - 1
            missing = range(known, min(known + _AT_ONCE, len(self._edges) - 1))
            ends = itertools.accumulate(self._sums(missing), initial=self._before[known])
            with self._lock:
                if len(self._before) == known + 1:  # else another thread has summed the same windows
                    self._before += itertools.islice(ends, 1, None)
        return bisect.bisect_right(self._before, token) - 1

    def _sums(self, windows: range) -> list[int]:
        """Tokens of each of these windows."""

        def tokens(w: int) -> int:
            return int(self.lengths[self._rows(w)].sum(dtype=np.int64))

        if not self.shuffle or len(windows) == 1:
            return [tokens(w) for w in windows]
        with ThreadPoolExecutor(min(len(windows), os.cpu_count() or 1), "multipack-plan") as threads:
            return list(threads.map(tokens, windows))

    def _window(self, w: int) -> _Window:
        with self._lock:
            window = self._windows.get(w)
        if window is None:
            rows = self._rows(w)
            window = _Window(rows, np.cumsum(self.lengths[rows], dtype=np.int64))
        with self._lock:
            _remember(self._windows, w, window)
        return window

    def _rows(self, w: int) -> NDArray[np.int64]:
        start, stop = self._edges[w], self._edges[w + 1]
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        rows = np.empty(stop - start, np.int64)
        _core.permuted_rows(
            self.num_rows, self.shuffle_block, window_seed(self.seed, self.epoch, 0), start, rows
        )
        return rows


def _cut(window: _Window, first: int, last: int) -> Fragments:
    """Tokens first..last-1 of a window, first < last."""
    a = int(np.searchsorted(window.ends, first, side="right"))
    b = int(np.searchsorted(window.ends, last, side="left")) + 1
    ends = window.ends[a:b]
    begins = np.concatenate([window.ends[a - 1 : a] if a else np.zeros(1, np.int64), ends[:-1]])
    from_token = np.maximum(begins, first)
    return Fragments(window.rows[a:b], from_token - begins, np.minimum(ends, last) - from_token)


def _remember(cache: OrderedDict[int, Any], key: int, value: Any) -> None:
    """Keep the values used last. The caller holds the lock."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _CACHED_WINDOWS:
        cache.popitem(last=False)


def _check_not_empty(lengths: NDArray[Any]) -> None:
    if lengths.size and int(lengths.min()) < 1:
        row = int(np.argmax(lengths < 1))
        raise ValueError(
            f"row {row} has length {int(lengths[row])}, below 1: it would be a document without tokens. "
            "Leave such rows out; TokenDataset does."
        )


def check_unlimited(max_sequences_per_bin: int | None, together: object, align_to: int) -> None:
    given = {
        "max_sequences_per_bin": max_sequences_per_bin,
        "together": together,
        "align_to": None if align_to == 1 else align_to,
    }
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} does not go with method='concat', which fills every bin whatever it holds: leave it "
                "out, or use another method."
            )


def check_documents(boundaries: Boundaries) -> None:
    check_choice("boundaries", boundaries, get_args(Boundaries))
