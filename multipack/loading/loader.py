"""A torch DataLoader that makes its batches beside the training loop.

The one rule: correctness lives in data set, batch sampler and collator; the loader adds only speed. A
framework that rebuilds a plain torch DataLoader from those three gets the same batches, bit for bit.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from multipack.arguments import check_choice
from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.dataset import TokenDataset
from multipack.distributed import check_agreement as check_ranks_agree
from multipack.frameworks import (
    AccelerateListener,
    RankSampler,
    accelerate_device,
    check_dealt,
    is_dealt_to_ranks,
)
from multipack.loading.device import DeviceCopier, DeviceLike, device_copier
from multipack.loading.feeds import Feed, SamplerFeed
from multipack.loading.passes import LoaderIterator, Maker, Source, ThreadPass, fetch_rows
from multipack.loading.stats import LoaderStats
from multipack.loading.streams import StreamFeed, is_own_stream, is_stream
from multipack.loading.torch_samplers import TorchSamplerFeed, draw_worker_seed, tell_epoch
from multipack.loading.workers import Recorder, TorchPass
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler

T_co = TypeVar("T_co", covariant=True)
WorkerType: TypeAlias = Literal["auto", "thread", "process"]


class DataLoader(TorchDataLoader[T_co]):
    """torch's DataLoader with its whole signature; batches of our own parts are made in background threads,
    in order.

    Our own parts are TokenDataset with our samplers and collators, and StreamPacker: they are known to be
    pure. Over anything else a script that changes its import line keeps its batches, its random numbers, its
    worker functions, its errors and its thread, unless it asks for threads. Arguments that are not listed
    mean what they mean in torch.

    Args:
        num_workers: background threads or, over parts that are not ours, torch's worker processes. None: one
            thread over our own parts, and torch's 0 otherwise. 0 makes each batch when it is asked for. With
            threads above 1 a data set of yours must be safe to read from several threads; an iterable one is
            read by one thread and collated by all.
        prefetch_factor: batches a worker may be ahead, 2 if None; times `num_workers` it bounds the queue.
        prefetch_batches: bounds the queue instead: batches taken from the sampler and not yet yielded; 0
            makes each batch when it is asked for. A batch of 65,536 tokens is about 1.6 MB.
        device: copy batches there from pinned memory on a side stream; they are ready when yielded. None and
            "cpu" leave them.
        worker_type: "thread"; "process" for torch's worker processes; "auto" takes threads over our own parts
            where neither `worker_init_fn` nor `multiprocessing_context` is given, else processes. Threads
            over parts of yours run beside the training loop: they share its global random states, so seeded
            runs repeat only if nothing draws from those.
        check_agreement: before the first pass the ranks compare what they plan, by one small collective;
            ranks with other data, capacity or seed are an error instead of a deadlock. All ranks must ask for
            it.
        timeout: seconds to wait for a batch before a RuntimeError, with the stacks of the threads; 0 waits
            without a limit.
        worker_init_fn, persistent_workers, multiprocessing_context: for worker processes. Threads have no
            state of their own that `worker_init_fn` could set up.
        in_order: threads always keep the order of the sampler, which False permits.

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
    _has_agreed = False
    _recorder: Recorder | None = None
    _feed: Feed | None = None

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
        worker_type: WorkerType = "auto",
        check_agreement: bool = False,
    ) -> None:
        check_choice("worker_type", worker_type, ("auto", "thread", "process"))
        if prefetch_batches is not None and prefetch_batches < 0:
            raise ValueError(
                f"prefetch_batches is {prefetch_batches}, below 0; 0 makes each batch when it is asked for."
            )
        self.worker_type: WorkerType = worker_type
        self.prefetch_batches = prefetch_batches
        self.device = device
        self.check_agreement = check_agreement
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,  # type: ignore[arg-type]  # torch takes any iterable of ids
            num_workers or 0,
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
            in_order=in_order,
        )
        self._workers_by_default = num_workers is None
        if prefetch_batches and self.num_workers > 0 and not self._runs_threads:
            self.prefetch_factor = -(-prefetch_batches // self.num_workers)
        if isinstance(batch_sampler, DistributedBatchSampler):
            # torch forbids assigning `sampler` after construction; go around its __setattr__.
            self.__dict__["sampler"] = RankSampler(batch_sampler, dataset)
        self._copier: DeviceCopier | None = None
        self._check_threads()
        self._current_feed()
        self._stats = LoaderStats(queue_depth=self._depth)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "num_workers":
            self.__dict__["_workers_by_default"] = False
        super().__setattr__(name, value)

    def __iter__(self) -> LoaderIterator:  # type: ignore[override]  # torch's iterator class is private
        check_dealt(self)
        self._stats.queue_depth = self._depth
        copier = self._device_copier()
        feed = self._current_feed()
        if self.check_agreement and not self._has_agreed:
            check_ranks_agree(
                json.dumps(
                    [feed.source.fingerprint, feed.source.skipped]
                    if isinstance(feed, SamplerFeed)
                    else len(self)
                )
            )
            self._has_agreed = True
        return LoaderIterator(
            feed,
            lambda: self._open(feed, copier),
            stats=self._stats,
            copier=copier,
            listener=AccelerateListener(self),
            loader=self,
        )

    @property
    def stats(self) -> LoaderStats:
        """Batches, tokens, padding and waiting so far; each field says how to read it."""
        return self._stats

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the data set the epoch, where they want to know.

        Our samplers advance after a whole epoch; this is for others, and for going anywhere else.
        """
        feed = self._current_feed()
        feed.set_epoch(epoch)
        tell_epoch(epoch, *(other for other in (self.sampler, self.dataset) if not _is_part_of(feed, other)))

    def skip_steps(self, steps: Iterable[int], epoch: int | None = None) -> None:
        """Leave optimizer steps of an epoch out; see the samplers' `skip_steps`. Kept in the state.

        Raises:
            TypeError: the batch sampler is not ours, so nothing names a step of it.
            ValueError: from the sampler.
        """
        source = self._current_feed().source
        if not isinstance(source, MultipackBatchSampler | DistributedBatchSampler):
            raise TypeError(
                "skip_steps needs a loader over DistributedBatchSampler, which plans its steps, not "
                f"{type(source).__qualname__}."
            )
        source.skip_steps(steps, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, by the batches it yielded, or where the next one begins.

        Raises:
            ValueError: DistributedBatchSampler wraps a sampler that draws its order at random, or worker processes
                read with in_order=False.
        """
        if not self.in_order and self.num_workers > 0 and not self._runs_threads:
            raise ValueError(
                "in_order=False lets worker processes hand over batches as they finish, so no number says which were "
                "yielded: resuming would repeat or lose rows. Use in_order=True, or do not save this loader."
            )
        return self._current_feed().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume there with the next batch, with any number and type of workers. No row is read to get there.

        Raises:
            ValueError: the state is of other data, or was saved where its position was unknown. With a
                sampler that is not ours this may also be raised by the next pass, when the sampler turns out
                to give another order.
        """
        self._current_feed().load_state_dict(state_dict)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether the batches are this rank's already, so that accelerate must not shard them again."""
        return is_dealt_to_ranks(self)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._prepared_by_accelerate = prepared

    def check_worker_number_rationality(self) -> None:
        """Leave out torch's warning about too many processes where there are only threads."""
        if not self._runs_threads:
            super().check_worker_number_rationality()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_iterator": None, "_copier": None, "_recorder": None}

    @property
    def _is_ours(self) -> bool:
        """Whether the parts are our own, which draw from no global state and are safe to read from
        threads."""
        if type(self.collate_fn) not in (PackedCollator, PaddedCollator):
            return False
        if is_own_stream(self.dataset):
            return True
        samplers = (MultipackBatchSampler, DistributedBatchSampler)
        return type(self.dataset) is TokenDataset and type(self.batch_sampler) in samplers

    @property
    def _runs_threads(self) -> bool:
        """Whether batches are made by our threads (or by the consumer itself, over our own parts)."""
        if self.worker_type == "auto":
            given = self.worker_init_fn is not None or self.multiprocessing_context is not None
            return self._is_ours and not given
        return self.worker_type == "thread" and (self._is_ours or self.num_workers > 0)

    @property
    def _num_threads(self) -> int:
        return 1 if self._workers_by_default and self._is_ours else self.num_workers

    @property
    def _depth(self) -> int:
        """Bound of our queue."""
        if not self._runs_threads or self._num_threads == 0 or self.prefetch_batches == 0:
            return 0
        return self.prefetch_batches or (self.prefetch_factor or 2) * self._num_threads

    @property
    def _index_sampler(self) -> Any:
        """Where torch's own iterator takes ids from: through the recorder, while it reads for us."""
        return super()._index_sampler if self._recorder is None else self._recorder

    def _current_feed(self) -> Feed:
        """The feed of the sampler or data set that is there now: scripts may put another one in its place."""
        source = self.dataset if is_stream(self.dataset) else super()._index_sampler
        if self._feed is None or self._feed.source is not source:
            self._feed = self._make_feed(source)
        return self._feed

    def _make_feed(self, source: Any) -> Feed:
        if is_stream(self.dataset):
            return StreamFeed(source, self._read_stream())
        if isinstance(source, MultipackBatchSampler | DistributedBatchSampler):
            _check_sizes(self.dataset, source)
            return SamplerFeed(
                source, self.dataset.read_ahead if isinstance(self.dataset, TokenDataset) else None
            )
        return TorchSamplerFeed(source, self.generator)

    def _open(self, feed: Feed, copier: DeviceCopier | None) -> Source:
        """Begin a pass."""
        reads_stream = isinstance(feed, StreamFeed) and (self._runs_threads or self.num_workers == 0)
        if not (self._runs_threads or reads_stream):
            return self._open_torch(feed, copier)
        fetch = self.collate_fn
        if not reads_stream:
            fetch = functools.partial(fetch_rows, self.dataset, self.collate_fn, self._auto_collation)
        elif isinstance(feed, StreamFeed) and isinstance(feed.rows, TorchDataLoader):
            feed.rows._IterableDataset_len_called = self._IterableDataset_len_called  # for torch's warning
        draws = self._draws_worker_seed(feed)
        return ThreadPass(
            feed,
            draw=(lambda: draw_worker_seed(self.generator)) if draws and not reads_stream else None,
            takes_first=not (self._is_ours or reads_stream),
            depth=self._depth,
            threads=max(1, self._num_threads),
            map=Maker(fetch, self._pinning_device(), copier),
            timeout=self.timeout if self._depth else 0,
            name="multipack-loader",
        )

    def _draws_worker_seed(self, feed: Feed) -> bool:
        """Whether a pass draws a seed from torch's generators, as torch's loader does for its workers: never over
        our own parts, and not where a pass is resumed that has drawn it, unless a generator is replayed."""
        drawn = isinstance(feed, TorchSamplerFeed) and feed.resumes and self.generator is None
        return not (self._is_ours or drawn)

    def _open_torch(self, feed: Feed, copier: DeviceCopier | None) -> TorchPass:
        if self._recorder is None or self._recorder.feed is not feed:
            self._recorder = Recorder(feed, super()._index_sampler)
        return TorchPass(
            self._recorder,
            super().__iter__,
            Maker(self.collate_fn, None, copier).finish,
            draws=self._draws_worker_seed(feed),
            workers=self.num_workers,
            keeps_workers=self.persistent_workers,
        )

    def _read_stream(self) -> Iterable[Any]:
        """The rows of each batch of an iterable data set, not yet collated: of other people's as torch reads
        them."""
        rows: Any = self.dataset
        if is_own_stream(rows):
            return rows  # type: ignore[no-any-return]  # an iterable of selections
        return TorchDataLoader(
            rows, self.batch_size, drop_last=self.drop_last, collate_fn=_as_they_are, generator=self.generator
        )

    def _check_threads(self) -> None:
        """Refuse what threads cannot do."""
        if self.worker_type == "thread" and self.worker_init_fn is not None:
            raise ValueError(
                "worker_init_fn sets up a worker process of its own; in threads it would change the "
                "training process, its random states above all. Use worker_type='process', or set up the "
                "data set where it is built."
            )
        if self.prefetch_batches and not (self._num_threads or self.num_workers):
            raise ValueError(
                f"prefetch_batches={self.prefetch_batches} with nothing that prefetches: pass num_workers >= "
                "1, or leave it out."
            )
        if self.timeout > 0 and self._runs_threads and self._depth == 0:
            raise ValueError(
                f"timeout={self.timeout} without prefetching: there is no thread to enforce it. Use "
                "num_workers >= 1, or timeout=0."
            )

    def _device_copier(self) -> DeviceCopier | None:
        """The copier for `device`, or for accelerate's device when an Accelerator prepared this loader; one
        for all passes."""
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
                "pin_memory is true but torch finds no accelerator, so memory is not pinned. Leave it out "
                "on the CPU.",
                stacklevel=4,
            )
            return None
        return accelerator.type


def _as_they_are(rows: Any) -> Any:
    return rows


def _check_sizes(dataset: Any, sampler: MultipackBatchSampler | DistributedBatchSampler) -> None:
    """Refuse lengths of other data: rows would be missed, or asked for that are not there."""
    planned = sampler.order.num_rows
    if planned is not None and isinstance(dataset, Sized) and len(dataset) != planned:
        raise ValueError(
            f"the data set has {len(dataset)} rows, but the batch sampler was built from the lengths of "
            f"{planned}: give it the lengths of this data set."
        )


def _is_part_of(feed: Feed, target: Any) -> bool:
    """Whether the feed has told `target` the epoch."""
    source = feed.source
    return target is source or target is getattr(source, "sampler", None) or isinstance(target, RankSampler)
