"""Pack data of unknown length: rows come in one by one, packed batches go out.

A pool of waiting rows gives nearly full bins in nearly the order of arrival, as `pack(method="stream")` does
for data that is all there. What one reading does is in `stream_pass`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from multipack.arguments import check_choice, whole_number
from multipack.closing import Closable
from multipack.data.dataset import Selection, TokenDataset
from multipack.data.overlong import Overlong
from multipack.distributed import data_ranks
from multipack.order.agreement import Agreement
from multipack.order.batch import BatchIndices
from multipack.order.packing import checked_capacity, sequence_limit
from multipack.order.stream_pass import SharedRows, StreamPass, StreamReport, is_hugging_face, is_stateful
from multipack.order.stream_rows import PackedRows, Row, StreamTail

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

STATE_VERSION = 1


class StreamPacker(IterableDataset[Selection]):
    """Packed batches of an iterable, for any DataLoader with `batch_size=None` and a PackedCollator.

    Args:
        source: rows as mappings with a list of tokens in `column`: an `IterableDataset` of Hugging Face, a
            generator function's result that can be iterated again, a list. It is read once a pass; a one-shot
            iterator gives one pass.
        capacity: token slots of a bin.
        column: the column whose length counts.
        pool_size: rows that wait; 1024 fills bins of text to 99.99 %. Eight bins' worth is enough.
        bins_per_batch: bins that one rank collates at once.
        overlong: what to do with rows above the capacity: "error", "truncate", "split" or "drop"; counted in
            `report`.
        max_sequences_per_bin: most sequences of a bin.
        seed: breaks ties between rows that fit equally well.
        num_replicas, rank: number of ranks and this one; None to discover them. A Hugging Face stream is
            split by `split_dataset_by_node`, any other by taking every num_replicas-th row.
        tail: ranks may have different numbers of batches, a number that is unknown beforehand, so with
            several ranks they agree before each batch by one small collective of their own (gloo). "pad":
            ranks that ran out repeat their last batch, which counts for nothing, until all ended, so that
            nothing is lost. "drop": all stop with the first.
        timeout: seconds after which waiting for the other ranks is an error.
        mesh, group: the data-parallel ranks, in the place of `num_replicas` and `rank`; see
            DistributedBatchSampler.

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
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        check_choice("overlong", overlong, get_args(Overlong))
        check_choice("tail", tail, get_args(StreamTail))
        self.ranks = data_ranks(rank, num_replicas, mesh=mesh, group=group)
        self.rank, self.num_replicas = self.ranks.rank, self.ranks.num_replicas
        self._source = _split_by_rank(source, self.rank, self.num_replicas)
        self._takes_every_nth = self._source is source
        self._start = copy.deepcopy(self._source.state_dict()) if is_stateful(self._source) else None
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
        self._agreement = Agreement(timeout, self.ranks.members) if self.num_replicas > 1 else None
        self._shared_epoch = torch.zeros((), dtype=torch.int64)
        self._shared_epoch.share_memory_()  # type: ignore[no-untyped-call]  # worker processes see it change
        self._loaded: dict[str, Any] | None = None
        self._pass: StreamPass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: passed on to a source that shuffles by it, also in worker processes that persist.

        A loaded state of another epoch is dropped; the epoch it already is in keeps its place.
        """
        if self._loaded is not None and self._loaded["source"]["epoch"] != epoch:
            self._loaded = None
        self._shared_epoch.fill_(whole_number("epoch", epoch, 0))

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return int(self._shared_epoch)

    def __iter__(self) -> Iterator[Selection]:
        opened: list[StreamPass] = []
        return Closable(self._read(opened), lambda: opened[-1].source if opened else None)

    def _read(self, opened: list[StreamPass]) -> Iterator[Selection]:
        worker = get_worker_info()
        if worker is not None and self._agreement is not None:
            raise ValueError(
                f"{worker.num_workers} worker processes cannot agree with {self.num_replicas} ranks on the "
                "end of a stream. Use multipack.DataLoader, whose workers are threads, or num_workers=0."
            )
        while True:
            loaded, self._loaded = self._loaded, None
            reading = self._open(loaded, worker.id if worker else 0, worker.num_workers if worker else 1)
            self._pass = reading
            opened.append(reading)
            batches = reading.batches()
            if self._agreement is not None:
                batches = self._agreement.keep_step(batches, self.tail, may_be_empty=loaded is not None)
            for rows in batches:
                yield self._select(rows)
                if self._was_loaded_into(reading):
                    break  # a state was loaded meanwhile: obeyed by the very next batch
            else:
                break
        if self._pass is reading:
            self._pass = None  # the next pass begins at the start, also after a state
        if self._agreement is None and loaded is None:
            self._check_not_empty(reading)

    def _open(self, loaded: dict[str, Any] | None, worker: int, num_workers: int) -> StreamPass:
        """Begin a pass over the source at its start, or where a state says."""
        if loaded is not None:
            self._shared_epoch.fill_(loaded["source"]["epoch"])
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self.epoch)
        share, shares = (self.rank, self.num_replicas) if self._takes_every_nth else (0, 1)
        if not is_hugging_face(self._source):  # whose streams give each worker process its own shards
            share, shares = share * num_workers + worker, shares * num_workers
        rows = SharedRows(self._source, share, shares, self._start, worker=[worker, num_workers])
        return StreamPass(self, rows, loaded)

    def _was_loaded_into(self, reading: StreamPass) -> bool:
        """Whether a state was loaded while this pass was open and the newest."""
        return self._loaded is not None and self._pass is reading

    def _check_not_empty(self, reading: StreamPass) -> None:
        if reading.is_untouched:
            raise ValueError(
                "the stream gave no row, so the epoch would be empty. A generator can be read only once: "
                "pass an iterable that begins again each time, such as a list or an IterableDataset."
            )
        if not reading.num_sequences:
            raise ValueError(
                f"none of the stream's {reading.num_read} rows can be packed, so the epoch would be empty: "
                f"{self.report.empty_sequences} have no token and {self.report.overlong_sequences} are above "
                f"the capacity of {self.capacity}. Check the source, and what overlong={self.overlong!r} "
                "drops."
            )

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: the source's position, and the rows that wait in the pool.

        The source's own `state_dict` where it has one, else the number of rows taken, which are read again
        and passed over on resume. The pool's rows are part of the state, so save it with what can hold them.
        """
        if self._loaded is not None:
            return self._loaded
        state = {"source": None} if self._pass is None else self._pass.state_dict(self.epoch)
        return {**self._inputs(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on from a state.

        Raises:
            ValueError: the state is of another version, capacity, pool, seed or number of ranks; names what
                differs.
        """
        ours = self._inputs()
        if not isinstance(state, Mapping) or "version" not in state or "source" not in state:
            raise ValueError(f"this is not the state of a StreamPacker: {state!r:.80}.")
        differing = [
            f"{k} ({state.get(k)!r} in the state, {v!r} here)" for k, v in ours.items() if state.get(k) != v
        ]
        if differing:
            raise ValueError(
                f"the state belongs to another stream: {', '.join(differing)}. Resuming would repeat or lose "
                "rows: build the StreamPacker with the same arguments on the same ranks."
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
        ids = BatchIndices(
            range(len(rows.rows)), rows.bin_offsets, bin_capacity=self.capacity, repeated=rows.repeated
        )
        selection = dataset.__getitems__(ids)
        selection.numbers = np.array(rows.numbers, np.int64)
        return selection


def _split_by_rank(source: Iterable[Row], rank: int, num_replicas: int) -> Any:
    """A Hugging Face stream split over ranks; other sources are returned as they are, to take every n-th row
    of."""
    if not isinstance(source, Iterable):
        raise TypeError(f"source must be an iterable of rows, not {type(source).__qualname__}.")
    if num_replicas > 1 and is_hugging_face(source):
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(source, rank=rank, world_size=num_replicas)
    return source
