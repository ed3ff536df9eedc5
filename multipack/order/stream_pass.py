"""One reading of a stream.

The one rule: a row that was taken from the source is in the pool, in a batch, or in the report.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from multipack import _core
from multipack.data.overlong import Overlong, apply_overlong
from multipack.order.packing import sequence_limit
from multipack.order.stream_rows import PackedRows, Row, cut, flattened

_END = object()


@dataclass
class StreamReport:
    """What became of rows that could not be packed as they were; counts since the stream began, as those of
    `DatasetReport`."""

    empty_sequences: int = 0
    """Rows without a token, left out because a bin cannot hold them."""
    overlong_sequences: int = 0
    """Rows above the capacity, which were truncated, split or dropped."""
    lost_tokens: int = 0
    """Tokens that were cut off or dropped."""


class Packing(Protocol):
    """What a pass must know of its StreamPacker."""

    capacity: int
    column: str
    pool_size: int
    bins_per_batch: int
    overlong: Overlong
    max_sequences_per_bin: int | None
    seed: int
    report: StreamReport


class SharedRows:
    """The rows of a source that one rank and worker reads: every `shares`-th one, from row `share` on.

    Args:
        source: any iterable.
        share, shares: which rows.
        start: state of the source at its start; None where it has none.
        worker: number of this worker process and how many there are.
    """

    def __init__(
        self, source: Any, share: int, shares: int, start: dict[str, Any] | None, *, worker: list[int]
    ) -> None:
        self._source = source
        self._share = share
        self._shares = shares
        self._start = start
        self.worker = worker
        self.opened: Iterator[Any] | None = None
        """What the source is read by, where that was made for this pass."""

    def open(self, num_read: int, state: dict[str, Any] | None) -> Iterator[Any]:
        """The rows behind the first `num_read`; `state` is that of the source as they were read, if it had
        one."""
        first = self._share + num_read * self._shares
        if state is not None and is_stateful(self._source):
            self._source.load_state_dict(state)
            if (
                num_read
            ):  # it stands behind the row read last; the rows of other shares come before the next of ours
                first = self._shares - 1
        elif self._start is not None:  # a source that was once resumed would begin there every time
            self._source.load_state_dict(copy.deepcopy(self._start))
        rows = iter(self._source)
        self.opened = None if rows is self._source else rows
        return itertools.islice(rows, first, None, self._shares)

    def number(self, num_read: int) -> int:
        """Row of the source of the row read as number `num_read`."""
        return self._share + num_read * self._shares

    def state(self) -> Any:
        """The source's own state, None where it has none that names its place."""
        return self._source.state_dict() if is_stateful(self._source) else None


class StreamPass:
    """Rows of a source, through the pool, into batches.

    Args:
        packer: how to pack.
        rows: what is read.
        loaded: the state to resume from; None to begin.
    """

    def __init__(self, packer: Packing, rows: SharedRows, loaded: dict[str, Any] | None) -> None:
        self._packer = packer
        self._source = rows
        limit = sequence_limit(packer.max_sequences_per_bin)
        self._pool = _core.StreamPool(packer.capacity, packer.pool_size, limit, packer.seed % 2**64)
        self._waiting: dict[int, tuple[dict[str, Any], int]] = {}  # rows in the pool, with their numbers
        self._pending: list[dict[str, Any]] = []  # fragments of the row read last that found no place yet
        self.num_sequences = 0
        """Sequences that went into the pool in this pass."""
        self.num_read = 0
        """Rows read."""
        self._source_ended = False
        state = None
        if loaded is not None:
            self._restore(loaded)
            state = loaded["source"]["state"]
        self._rows: Iterator[Any] = iter(()) if self._source_ended else rows.open(self.num_read, state)

    @property
    def source(self) -> Iterator[Any] | None:
        """What the source is read by, where that was made for this pass."""
        return self._source.opened

    @property
    def is_untouched(self) -> bool:
        """No row ever came."""
        return self.num_read == 0

    def batches(self) -> Iterator[PackedRows]:
        """Batches while the source gives rows, then what is left in the pool, longest first."""
        while True:
            self._refill()
            if not len(self._pool):
                return
            yield self._take()

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """The source's position and the rows that wait."""
        pool = self._pool.state()
        waiting = [self._waiting[i] for i in pool.ids]
        return {
            "source": {
                "epoch": epoch,
                "num_read": self.num_read,
                "ended": self._source_ended,
                "state": self._source.state(),
                "worker": self._source.worker,
            },
            "pool": {
                "rows": [row for row, _ in waiting],
                "numbers": [number for _, number in waiting],
                "pending": list(self._pending),
                "arrivals": pool.arrivals,
                "next_arrival": pool.next_arrival,
                "search_budget": pool.search_budget,
                "random": pool.random,
            },
            "report": asdict(self._packer.report),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["source"]["worker"] != self._source.worker:
            raise ValueError(
                f"the state is that of worker {state['source']['worker']}, not of {self._source.worker}: "
                "use the same number of worker processes."
            )
        pool = state["pool"]
        rows = list(pool["rows"])
        lengths = [self._length(row) for row in rows]
        self._pool.restore(
            _core.StreamPoolState(
                range(len(rows)),
                pool["arrivals"],
                lengths,
                pool["next_arrival"],
                pool["search_budget"],
                pool["random"],
            )
        )
        numbers = pool.get("numbers", [-1] * len(rows))  # states saved before rows were numbered
        self._waiting = dict(enumerate(zip(rows, numbers, strict=True)))
        self._pending = list(pool["pending"])
        self.num_sequences = len(rows)
        self.num_read = state["source"]["num_read"]
        self._source_ended = state["source"]["ended"]
        self._packer.report = StreamReport(**state["report"])

    def _refill(self) -> None:
        while not self._pool.full:
            if not self._pending:
                row: Any = _END if self._source_ended else next(self._rows, _END)
                if row is _END:
                    self._source_ended = True
                    return
                self.num_read += 1
                self._pending = self._fit(row)
                continue
            fitting = self._pending.pop(0)
            self._waiting[self.num_sequences] = fitting, self._source.number(self.num_read - 1)
            self._pool.push(self.num_sequences, self._length(fitting))
            self.num_sequences += 1

    def _take(self) -> PackedRows:
        taken: list[tuple[dict[str, Any], int]] = []
        ends = [0]
        for _ in range(self._packer.bins_per_batch):
            self._refill()
            if not len(self._pool):
                break
            taken += [self._waiting.pop(i) for i in self._pool.fill(not self._pool.full)]
            ends.append(len(taken))
        return PackedRows([row for row, _ in taken], tuple(number for _, number in taken), tuple(ends))

    def _length(self, row: Any) -> int:
        column = self._packer.column
        try:
            return len(row[column])
        except (KeyError, TypeError, IndexError):
            keys = sorted(row) if isinstance(row, Mapping) else f"a {type(row).__qualname__}"
            raise TypeError(
                f"row {self._source.number(self.num_read - 1)} of the stream has no list of tokens in column "
                f"{column!r}, only {keys}."
            ) from None

    def _fit(self, row: Row) -> list[dict[str, Any]]:
        """The row as it can be packed: itself, nothing, cut, or in pieces."""
        packer, report = self._packer, self._packer.report
        row = flattened(row)
        length = self._length(row)
        if 0 < length <= packer.capacity:
            return [dict(row)]
        if length and packer.overlong == "error":
            raise ValueError(
                f"row {self._source.number(self.num_read - 1)} of the stream has {length} tokens, "
                f"{length - packer.capacity} above the capacity of {packer.capacity}: it fits no bin. Raise "
                "the capacity, or pass overlong='truncate', 'split' or 'drop'."
            )
        usable = apply_overlong(np.array([length]), packer.capacity, packer.overlong)
        report.empty_sequences += usable.report.empty_sequences
        report.overlong_sequences += usable.report.overlong_sequences
        report.lost_tokens += usable.report.lost_tokens
        starts = np.zeros_like(usable.lengths) if usable.starts is None else usable.starts
        places = zip(starts.tolist(), usable.lengths.tolist(), strict=True)
        return [cut(row, length, start, start + size) for start, size in places]


def is_stateful(source: Any) -> bool:
    """Whether a source's own state names its place, with all that it holds back.

    A stream of Hugging Face that shuffles keeps rows in a buffer that its state leaves out: they would be
    lost, so its rows are counted, as those of plain iterables are.
    """
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict") and not _buffers_rows(source)


def is_hugging_face(source: Any) -> bool:
    """Whether a source is a stream of the package `datasets`."""
    return type(source).__module__.partition(".")[0] == "datasets"


def _buffers_rows(source: Any) -> bool:
    found = [getattr(source, "_ex_iterable", None)] if is_hugging_face(source) else []
    while found:
        step = found.pop()
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return True
        found += [
            inner
            for inner in (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ()))
            if inner
        ]
    return False
