"""Pack data of unknown length: rows come in one by one, packed batches go out.

A pool of waiting rows gives nearly full bins in nearly the order of arrival, as `pack(method="stream")` does for data that is
all there. The one rule: a row that was taken from the source is in the pool, in a batch, or in the report.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from multipack import _core
from multipack.arguments import check_choice, whole_number
from multipack.closing import Closable
from multipack.data.dataset import Selection, TokenDataset
from multipack.data.overlong import Overlong, apply_overlong
from multipack.distributed import rank_and_world_size
from multipack.order.agreement import Agreement
from multipack.order.batch import BatchIndices
from multipack.order.packing import checked_capacity, sequence_limit
from multipack.order.stream_rows import PackedRows, Row, StreamTail, cut, flattened

STATE_VERSION = 1


@dataclass
class StreamReport:
    """What became of rows that could not be packed as they were; counts since the stream began, as those of `DatasetReport`."""

    empty_sequences: int = 0
    """Rows without a token, left out because a bin cannot hold them."""
    overlong_sequences: int = 0
    """Rows above the capacity, which were truncated, split or dropped."""
    lost_tokens: int = 0
    """Tokens that were cut off or dropped."""


class StreamPacker(IterableDataset[Selection]):
    """Packed batches of an iterable, for any DataLoader with `batch_size=None` and a PackedCollator.

    Args:
        source: rows as mappings with a list of tokens in `column`: an `IterableDataset` of Hugging Face, a generator function's
            result that can be iterated again, a list. It is read once a pass; a one-shot iterator gives one pass.
        capacity: token slots of a bin.
        column: the column whose length counts.
        pool_size: rows that wait; 1024 fills bins of text to 99.99 %. Eight bins' worth is enough.
        bins_per_batch: bins that one rank collates at once.
        overlong: what to do with rows above the capacity: "error", "truncate", "split" or "drop"; counted in `report`.
        max_sequences_per_bin: most sequences of a bin.
        seed: breaks ties between rows that fit equally well.
        num_replicas, rank: number of ranks and this one; None to discover them. A Hugging Face stream is split by
            `split_dataset_by_node`, any other by taking every num_replicas-th row.
        tail: ranks may have different numbers of batches, which nobody knows beforehand, so with several ranks they agree
            before each batch by one small collective of their own (gloo). "pad": ranks that ran out repeat their last batch,
            which counts for nothing, until all ended, so that nothing is lost. "drop": all stop with the first.
        timeout: seconds after which waiting for the other ranks is an error.

    Raises:
        ValueError: a bad argument; while iterating also a row above the capacity, or a rank without any row.
        TypeError: while iterating, a row without the column.
    """

    deals_to_ranks = True
    """Each rank gets a share of its own; see `frameworks`."""

    def __init__(
        self,
        source: Iterable[Row],
        capacity: int,
        *,
        column: str = "input_ids",
        pool_size: int = 1024,
        bins_per_batch: int = 1,
        overlong: Overlong = "error",
        max_sequences_per_bin: int | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        tail: StreamTail = "pad",
        timeout: float = 600.0,
    ) -> None:
        check_choice("overlong", overlong, get_args(Overlong))
        check_choice("tail", tail, get_args(StreamTail))
        self.rank, self.num_replicas = rank_and_world_size(rank, num_replicas)
        self._source = _split_by_rank(source, self.rank, self.num_replicas)
        self._takes_every_nth = self._source is source
        self._start = copy.deepcopy(self._source.state_dict()) if _is_stateful(self._source) else None
        self.capacity = checked_capacity(capacity)
        self.column = column
        self.pool_size = whole_number("pool_size", pool_size, 1)
        self.bins_per_batch = whole_number("bins_per_batch", bins_per_batch, 1)
        self.overlong: Overlong = overlong
        self.max_sequences_per_bin = (
            None if max_sequences_per_bin is None else sequence_limit(max_sequences_per_bin)
        )
        self.seed = whole_number("seed", seed)
        self.tail: StreamTail = tail
        self.report = StreamReport()
        self._agreement = Agreement(timeout) if self.num_replicas > 1 else None
        self._epoch = 0
        self._loaded: dict[str, Any] | None = None
        self._pass: _Pass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: passed on to a source that shuffles by it."""
        self._epoch = epoch
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Selection]:
        opened: list[_Pass] = []
        return Closable(self._read(opened), lambda: opened[0].source if opened else None)

    def _read(self, opened: list[_Pass]) -> Iterator[Selection]:
        worker = get_worker_info()
        if worker is not None and self._agreement is not None:
            raise ValueError(
                f"{worker.num_workers} worker processes cannot agree with {self.num_replicas} ranks on the end of a stream. "
                "Use multipack.DataLoader, whose workers are threads, or num_workers=0."
            )
        loaded, self._loaded = self._loaded, None
        reading = _Pass(self, loaded, worker.id if worker else 0, worker.num_workers if worker else 1)
        self._pass = reading
        opened.append(reading)
        batches = reading.batches()
        if self._agreement is not None:
            batches = self._agreement.keep_step(batches, self.tail, may_be_empty=loaded is not None)
        for rows in batches:
            yield self._select(rows)
        if self._pass is reading:
            self._pass = None  # the next pass begins anew, also from a state
        if self._agreement is None and loaded is None and reading.is_untouched:
            raise ValueError(
                "the stream gave no row, so the epoch would be empty. A generator can be read only once: pass an iterable that "
                "begins anew each time, such as a list or an IterableDataset."
            )

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: the source's position, and the rows that wait in the pool.

        The source's own `state_dict` where it has one, else the number of rows taken, which are read again and passed over on
        resume. The pool's rows are part of the state, so save it with what can hold them.
        """
        if self._loaded is not None:
            return self._loaded
        return self._pass.state_dict() if self._pass is not None else {**self._inputs(), "source": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on from a state.

        Raises:
            ValueError: the state is of another version, capacity, pool, seed or number of ranks; names what differs.
        """
        ours = self._inputs()
        if not isinstance(state, Mapping) or "version" not in state or "source" not in state:
            raise ValueError(f"this is not the state of a StreamPacker: {state!r:.80}.")
        differing = [
            f"{k} ({state.get(k)!r} in the state, {v!r} here)" for k, v in ours.items() if state.get(k) != v
        ]
        if differing:
            raise ValueError(
                f"the state belongs to another stream: {', '.join(differing)}. Going on would repeat or lose rows: build the "
                "StreamPacker with the same arguments on the same ranks."
            )
        self._loaded = None if state["source"] is None else dict(state)

    def _inputs(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "capacity": self.capacity,
            "pool_size": self.pool_size,
            "bins_per_batch": self.bins_per_batch,
            "seed": self.seed,
            "overlong": self.overlong,
            "max_sequences_per_bin": self.max_sequences_per_bin,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
        }

    def _select(self, rows: PackedRows) -> Selection:
        dataset = TokenDataset(rows.rows, column=self.column)
        return dataset.__getitems__(
            BatchIndices(
                range(len(rows.rows)),
                rows.bin_offsets,
                bin_capacity=self.capacity,
                repeated=rows.repeated,
            )
        )


class _Pass:
    """One reading of the source."""

    def __init__(
        self, packer: StreamPacker, loaded: dict[str, Any] | None, worker: int, num_workers: int
    ) -> None:
        self._packer = packer
        self._worker = worker
        self._num_workers = num_workers
        limit = sequence_limit(packer.max_sequences_per_bin)
        self._pool = _core.StreamPool(packer.capacity, packer.pool_size, limit, packer.seed % 2**64)
        self._waiting: dict[int, dict[str, Any]] = {}
        self._pending: list[dict[str, Any]] = []  # fragments of the row read last that found no place yet
        self._next_id = 0
        self._num_read = 0
        self._source_ended = False
        self.source: Iterator[Row] | None = None
        """What the source is read by, where that was made for this pass."""
        if loaded is not None:
            self._restore(loaded)
        self._rows = self._open(loaded)

    @property
    def is_untouched(self) -> bool:
        """No row ever came."""
        return self._num_read == 0

    def batches(self) -> Iterator[PackedRows]:
        """Batches while the source gives rows, then what is left in the pool, longest first."""
        while True:
            self._refill()
            if not len(self._pool):
                return
            yield self._take()

    def state_dict(self) -> dict[str, Any]:
        pool = self._pool.state()
        source = self._packer._source
        return {
            **self._packer._inputs(),
            "source": {
                "epoch": self._packer._epoch,
                "num_read": self._num_read,
                "ended": self._source_ended,
                "state": source.state_dict() if _is_stateful(source) else None,
                "worker": [self._worker, self._num_workers],
            },
            "pool": {
                "rows": [self._waiting[i] for i in pool.ids],
                "pending": list(self._pending),
                "arrivals": pool.arrivals,
                "next_arrival": pool.next_arrival,
                "search_budget": pool.search_budget,
                "random": pool.random,
            },
            "report": asdict(self._packer.report),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["source"]["worker"] != [self._worker, self._num_workers]:
            raise ValueError(
                f"the state is that of worker {state['source']['worker']}, not of {[self._worker, self._num_workers]}: "
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
        self._waiting = dict(enumerate(rows))
        self._pending = list(pool["pending"])
        self._next_id = len(rows)
        self._num_read = state["source"]["num_read"]
        self._source_ended = state["source"]["ended"]
        self._packer.report = StreamReport(**state["report"])

    def _open(self, loaded: dict[str, Any] | None) -> Iterator[Row]:
        """The rows of this rank and worker that were not read yet."""
        packer, source = self._packer, self._packer._source
        at_place = False
        if loaded is not None:
            packer.set_epoch(loaded["source"]["epoch"])
            if self._source_ended:  # it may stand at its start again
                return iter(())
            if _is_stateful(source) and loaded["source"]["state"] is not None:
                source.load_state_dict(loaded["source"]["state"])
                at_place = self._num_read > 0
        elif packer._start is not None:  # a source that was once resumed would begin there for ever
            source.load_state_dict(copy.deepcopy(packer._start))
        share, shares = 0, 1
        if packer._takes_every_nth:
            share, shares = packer.rank, packer.num_replicas
        if not _splits_by_worker(source):
            share, shares = share * self._num_workers + self._worker, shares * self._num_workers
        # A source at its place stands behind the row read last; the rows of other shares come before the next of ours.
        first = shares - 1 if at_place else share + self._num_read * shares
        rows = iter(source)
        self.source = None if rows is source else rows
        return itertools.islice(rows, first, None, shares)

    def _refill(self) -> None:
        while not self._pool.full:
            if not self._pending:
                row = None if self._source_ended else next(self._rows, None)
                if row is None:
                    self._source_ended = True
                    return
                self._num_read += 1
                self._pending = self._fit(row)
                continue
            row = self._pending.pop(0)
            self._waiting[self._next_id] = row
            self._pool.push(self._next_id, self._length(row))
            self._next_id += 1

    def _take(self) -> PackedRows:
        rows: list[dict[str, Any]] = []
        ends = [0]
        for _ in range(self._packer.bins_per_batch):
            self._refill()
            if not len(self._pool):
                break
            rows += [self._waiting.pop(i) for i in self._pool.fill(not self._pool.full)]
            ends.append(len(rows))
        return PackedRows(rows, tuple(ends))

    def _length(self, row: Row) -> int:
        try:
            return len(row[self._packer.column])
        except (KeyError, TypeError, IndexError):
            keys = sorted(row) if isinstance(row, Mapping) else f"a {type(row).__qualname__}"
            raise TypeError(
                f"row {self._num_read - 1} of the stream has no list of tokens in column {self._packer.column!r}, only {keys}."
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
                f"row {self._num_read - 1} of the stream has {length} tokens, {length - packer.capacity} above the capacity of "
                f"{packer.capacity}: it fits no bin. Raise the capacity, or pass overlong='truncate', 'split' or 'drop'."
            )
        usable = apply_overlong(np.array([length]), packer.capacity, packer.overlong)
        report.empty_sequences += usable.report.empty_sequences
        report.overlong_sequences += usable.report.overlong_sequences
        report.lost_tokens += usable.report.lost_tokens
        starts = np.zeros_like(usable.lengths) if usable.starts is None else usable.starts
        places = zip(starts.tolist(), usable.lengths.tolist(), strict=True)
        return [cut(row, length, start, start + size) for start, size in places]


def _is_stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _splits_by_worker(source: Any) -> bool:
    """Hugging Face streams give each worker process its own shards by themselves."""
    return type(source).__module__.partition(".")[0] == "datasets"


def _split_by_rank(source: Iterable[Row], rank: int, num_replicas: int) -> Any:
    """A Hugging Face stream split over ranks; other sources are returned as they are, to take every n-th row of."""
    if not isinstance(source, Iterable):
        raise TypeError(f"source must be an iterable of rows, not {type(source).__qualname__}.")
    if num_replicas > 1 and type(source).__module__.partition(".")[0] == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(source, rank=rank, world_size=num_replicas)
    return source
