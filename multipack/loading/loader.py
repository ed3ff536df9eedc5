"""A torch DataLoader that makes its batches beside the training loop.

The one rule: correctness lives in data set, batch sampler and collator; the loader adds only speed. A framework that rebuilds a plain
torch DataLoader from those three gets the same batches, bit for bit.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.data.overlong import Overlong
from multipack.loading.accelerate_view import accelerate_device
from multipack.loading.device import DeviceCopier, DeviceLike, device_copier
from multipack.loading.framework_view import RankSampler, check_dealt, is_dealt_to_ranks
from multipack.loading.loader_iterator import LoaderIterator, Maker
from multipack.loading.position import Position, StreamPosition, position_of
from multipack.loading.prefetch import Prefetcher
from multipack.loading.process_feed import ProcessFeed
from multipack.loading.stats import LoaderStats
from multipack.order.balance import BalanceMode
from multipack.order.packing import PackMethod
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.tail import Tail

T_co = TypeVar("T_co", covariant=True)
WorkerType: TypeAlias = Literal["thread", "process"]


class DataLoader(TorchDataLoader[T_co]):
    """torch's DataLoader with its whole signature; batches are made in background threads, in order, and ready when asked for.

    Arguments that are not listed mean what they mean in torch.

    Args:
        num_workers: background threads; None is 1. 0 makes each batch when it is asked for. Above 1 the data set must be safe to
            read from several threads; an iterable one is read by one thread and collated by all.
        prefetch_factor: batches a worker may be ahead, 2 if None; times `num_workers` it bounds the queue.
        prefetch_batches: bounds the queue instead: batches taken from the sampler and not yet yielded; 0 makes each batch when it
            is asked for. A batch of 65,536 tokens is about 1.6 MB.
        device: copy batches there from pinned memory on a side stream; they are ready when yielded. None and "cpu" leave them.
        worker_type: "thread", or "process" for torch's worker processes behind our queue, which then holds one batch more.
            Processes help where a collator is slow Python, or where the data set draws from global random states.
        timeout: seconds to wait for a batch before a RuntimeError, with the stacks of the threads; 0 waits for ever.
        worker_init_fn: called in each thread with its number. `get_worker_info()` is None there, as there is one data set.
        persistent_workers, multiprocessing_context: for worker_type="process"; threads start in no time.
        in_order: batches always keep the order of the sampler, which False permits.

    With torch's samplers and the same `num_workers` the order is that of torch's loader for the same generator or global seed.

    Raises:
        ValueError: a number is negative, or arguments exclude each other.
    """

    end_of_dataloader = False
    """For accelerate: the batch yielded last was the last one of the pass."""
    remainder = -1
    """For accelerate: unknown, so nothing is cut off gathered results."""
    use_stateful_dataloader = True
    """For accelerate: save and load `state_dict` with its checkpoints."""

    _prepared_by_accelerate = False

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        prefetch_batches: int | None = None,
        device: DeviceLike | None = None,
        worker_type: WorkerType = "thread",
    ) -> None:
        workers = 1 if num_workers is None else num_workers
        if worker_type not in ("thread", "process"):
            raise ValueError(f"worker_type is {worker_type!r}; it must be 'thread' or 'process'.")
        if prefetch_batches is not None and prefetch_batches < 0:
            raise ValueError(
                f"prefetch_batches is {prefetch_batches}, below 0; 0 makes each batch when it is asked for."
            )
        if timeout > 0 and (workers == 0 or prefetch_batches == 0):
            raise ValueError(
                f"timeout={timeout} with nothing made ahead: nobody can watch. Use num_workers >= 1, or timeout=0."
            )
        if worker_type == "process" and workers > 0 and prefetch_batches:
            prefetch_factor = -(-prefetch_batches // workers)
        self.worker_type: WorkerType = worker_type
        self.prefetch_batches = prefetch_batches
        self.device = device
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,  # type: ignore[arg-type]
            workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        if isinstance(batch_sampler, DistributedBatchSampler):
            # torch's own, which nobody reads, may not be set from here on.
            self.__dict__["sampler"] = RankSampler(batch_sampler, dataset)
        self._draws_first = bool(num_workers)  # torch's workers take their first ids in iter()
        self._stats = LoaderStats(queue_depth=self._depth)
        self._newest: Callable[[], LoaderIterator | None] = _no_iterator
        self._copier: DeviceCopier | None = None
        is_stream = isinstance(self.dataset, IterableDataset)
        self._stream_rows = self._read_stream() if is_stream else None
        self._position: Position = (
            StreamPosition(self.dataset, None if self._runs_processes else self._stream_rows)
            if is_stream
            else position_of(self._index_sampler, generator)
        )
        self._feed = self._make_feed()

    def __iter__(self) -> LoaderIterator:  # type: ignore[override]
        check_dealt(self)
        copier = self._device_copier()
        fetch: Callable[[Any], Any]
        pin_for = None
        if self._feed is not None:
            pairs: Iterable[tuple[Any, Any]] = self._feed.open(super().__iter__)
            fetch = attrgetter("batch")
        else:
            pin_for = self._pinning_device()
            if self._stream_rows is not None:
                self._stream_rows._IterableDataset_len_called = self._IterableDataset_len_called
                fetch = self.collate_fn
            else:
                fetch = functools.partial(_fetch, self.dataset, self.collate_fn, self._auto_collation)
            pairs = self._position.start(self._draws_first)
        prefetcher = Prefetcher(
            pairs,
            depth=self._depth,
            threads=1 if self._feed is not None else max(1, self.num_workers),
            map=Maker(fetch, self._capacity, pin_for, copier),
            timeout=0 if self._feed is not None else self.timeout,
            on_thread_start=None if self._feed is not None else self.worker_init_fn,
            name="multipack-loader",
        )
        iterator = LoaderIterator(self, prefetcher, copier)
        self._newest = weakref.ref(iterator)
        return iterator

    @property
    def stats(self) -> LoaderStats:
        """Batches, tokens, padding and waiting so far; each field says how to read it."""
        return self._stats

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the data set the epoch, where they want to know.

        Our samplers go on by themselves after a whole epoch; this is for others, and for going anywhere else.
        """
        self._position.set_epoch(epoch)
        inner = getattr(self.batch_sampler, "sampler", None)
        for target in {id(t): t for t in (self.batch_sampler, self.sampler, inner, self.dataset)}.values():
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, by the batches it yielded, or where the next one begins.

        Raises:
            ValueError: DistributedBatchSampler wraps a sampler that draws its order at random.
        """
        return self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass begin there, with any number and type of workers. No row is read to get there.

        Raises:
            ValueError: the state is of other data, or was saved where nobody can go on. With a sampler that is not ours this may
                also be raised by the next pass, when the sampler turns out to give another order.
        """
        self._position.load_state_dict(state_dict)
        if state_dict.get("epoch") is not None:  # of a sampler that is not ours
            self.set_epoch(state_dict["epoch"])

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether the batches are this rank's already, so that accelerate must not deal them once more."""
        return is_dealt_to_ranks(self)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._prepared_by_accelerate = prepared

    def check_worker_number_rationality(self) -> None:
        """Leave out torch's warning about too many processes where there are only threads."""
        if self.worker_type == "process":
            super().check_worker_number_rationality()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_iterator": None, "_copier": None, "_feed": None, "_newest": _no_iterator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._feed = self._make_feed()

    @property
    def _runs_processes(self) -> bool:
        return self.worker_type == "process" and self.num_workers > 0

    @property
    def _depth(self) -> int:
        """Bound of our queue. Worker processes have one of their own before it, so one ready batch is enough there."""
        if self.num_workers == 0 or self.prefetch_batches == 0:
            return 0
        if self._runs_processes:
            return 1
        return self.prefetch_batches or (self.prefetch_factor or 0) * self.num_workers

    @property
    def _index_sampler(self) -> Any:
        """Where torch's own iterator takes ids from: through the feed, if there is one."""
        feed = self.__dict__.get("_feed")
        return super()._index_sampler if feed is None or self._stream_rows is not None else feed

    @property
    def _capacity(self) -> int:
        """Token slots of a bin, 0 where nothing is packed."""
        packs = self.batch_sampler if self._stream_rows is None else self.dataset
        return getattr(packs, "capacity", None) or 0

    def _make_feed(self) -> ProcessFeed | None:
        if not self._runs_processes:
            return None
        has_ids = self._stream_rows is None
        return ProcessFeed(
            super()._index_sampler, self._position, has_ids=has_ids, persistent=self.persistent_workers
        )

    def _read_stream(self) -> TorchDataLoader[Any]:
        """torch's own reading of an iterable data set: the rows of each batch, not yet collated."""
        return TorchDataLoader(
            self.dataset,
            self.batch_size,
            drop_last=self.drop_last,
            collate_fn=_as_they_are,
            generator=self.generator,
        )

    def _device_copier(self) -> DeviceCopier | None:
        """The copier for `device`, or for accelerate's device when an Accelerator prepared this loader; one for all passes."""
        device = self.device
        if device is None and self._prepared_by_accelerate:
            device = accelerate_device()
        if self._copier is None:
            self._copier = device_copier(device)
        return self._copier

    def _pinning_device(self) -> str | None:
        if not self.pin_memory or self.device is not None:
            return None
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            warnings.warn(
                "pin_memory is true but torch finds no accelerator, so memory is not pinned. Leave it out on the CPU.",
                stacklevel=3,
            )
            return None
        return accelerator.type


def _fetch(dataset: Any, collate_fn: Callable[[Any], Any], in_batches: bool, ids: Any) -> Any:
    """Rows of the ids as torch fetches them, collated."""
    if not in_batches:
        return collate_fn(dataset[ids])
    get_many = getattr(dataset, "__getitems__", None)
    return collate_fn(get_many(ids) if get_many else [dataset[i] for i in ids])


def _as_they_are(rows: Any) -> Any:
    return rows


def _no_iterator() -> None:
    """Stands for the newest iterator where there is none; a function, so that loaders pickle."""


def packed_dataloader(
    source: Any,
    capacity: int,
    *,
    bins_per_batch: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    method: PackMethod = "auto",
    max_sequences_per_bin: int | None = None,
    column: str = "input_ids",
    columns: Sequence[str] | None = None,
    max_length: int | None = None,
    overlong: Overlong = "error",
    layout: Literal["flat", "rows"] = "flat",
    pad_to: Literal["capacity"] | int | None = None,
    pad_token_id: int = 0,
    tail: Tail = "split",
    accumulate: int = 1,
    balance: BalanceMode = "none",
    rank: int | None = None,
    num_replicas: int | None = None,
    num_workers: int = 1,
    prefetch_batches: int | None = None,
    device: DeviceLike | None = None,
    worker_type: WorkerType = "thread",
    timeout: float = 0,
) -> DataLoader[dict[str, Any]]:
    """Packed batches of this rank's share of `source`: data set, samplers, collator and loader in one call.

    Args:
        source: a TokenDataset, or anything that one reads.
        capacity: token slots of a bin; a batch has `bins_per_batch` of them.
        max_length: longest sequence in tokens, `capacity` if None; what is longer goes by `overlong`.
        column, columns, overlong: as for TokenDataset. With a TokenDataset as source these, and `max_length`, must be left alone.
        shuffle, seed, method, max_sequences_per_bin: as for MultipackBatchSampler.
        layout, pad_to, pad_token_id: as for PackedCollator.
        tail, accumulate, balance, rank, num_replicas: as for DistributedBatchSampler.
        num_workers, prefetch_batches, device, worker_type, timeout: as for DataLoader.

    The loader's `len` is exact, and the same on every rank.

    Raises:
        ValueError: from those parts; or `column`, `columns`, `max_length` or `overlong` is given beside a TokenDataset.
    """
    if isinstance(source, TokenDataset):
        if (column, columns, max_length, overlong) != ("input_ids", None, None, "error"):
            raise ValueError(
                "column, columns, max_length and overlong say how to read a source, but this TokenDataset is read already: give "
                "them to TokenDataset, or pass its source."
            )
        dataset = source
    else:
        dataset = TokenDataset(
            source,
            column=column,
            max_length=capacity if max_length is None else max_length,
            overlong=overlong,
            columns=columns,
        )
    batch_sampler = MultipackBatchSampler(
        dataset.lengths,
        capacity,
        bins_per_batch=bins_per_batch,
        shuffle=shuffle,
        seed=seed,
        method=method,
        max_sequences_per_bin=max_sequences_per_bin,
    )
    return DataLoader(
        dataset,
        batch_sampler=DistributedBatchSampler(
            batch_sampler,
            num_replicas=num_replicas,
            rank=rank,
            tail=tail,
            accumulate=accumulate,
            balance=balance,
        ),
        collate_fn=PackedCollator(layout=layout, capacity=capacity, pad_to=pad_to, pad_token_id=pad_token_id),
        num_workers=num_workers,
        prefetch_batches=prefetch_batches,
        device=device,
        worker_type=worker_type,
        timeout=timeout,
    )
