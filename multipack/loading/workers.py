"""torch's own iterators, in this process or with worker processes, and the marks of the batches they give.

torch takes ids ahead for its workers and returns batches without them. A recorder stands between its iterator
and the feed, and keeps for each batch what must be known when it is yielded: batches come back in the order
in which their ids were taken.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from multipack.loading.feeds import Feed
from multipack.loading.passes import Made
from multipack.loading.streams import StreamFeed, StreamMark


class Recorder:
    """The sampler that torch's iterator sees. Workers that persist keep it, and read pass after pass through
    it."""

    def __init__(self, feed: Feed, index_sampler: Any) -> None:
        self.feed = feed
        self.index_sampler = index_sampler
        self.number = -1
        self.taken: deque[tuple[Any, Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.feed, StreamFeed):
            # Endless: the number of rows of a batch; the stream says when it ends.
            return iter(self.index_sampler)
        self.number, items = self.feed.open()
        self.taken = deque()
        return self._record(items, self.taken)

    def __len__(self) -> int:
        return len(self.index_sampler)

    def _record(self, items: Iterator[tuple[Any, Any]], taken: deque[tuple[Any, Any]]) -> Iterator[Any]:
        for pair in items:
            taken.append(pair)
            yield pair[0]


class TorchPass:
    """One pass by torch's own iterator, in the consumer's thread: its errors, its random draws and its
    workers are torch's.

    Args:
        recorder: what the iterator takes ids from.
        make_iterator: torch's `DataLoader.__iter__`.
        finish: (batch, ids, mark) -> what the loader yields.
        draws: the pass draws its workers' seed as torch does; else no global generator is touched.
        workers: number of worker processes.
        keeps_workers: they persist.
    """

    ready = 0

    def __init__(
        self,
        recorder: Recorder,
        make_iterator: Callable[[], Iterator[Any]],
        finish: Callable[[Any, Any, Any], Made],
        *,
        draws: bool,
        workers: int,
        keeps_workers: bool,
    ) -> None:
        self._recorder = recorder
        self._finish = finish
        self._workers = workers
        self._keeps_workers = keeps_workers
        self._num_yielded = 0
        self._is_silent = False  # the last call waited in vain, so a worker may hang
        self.busy_seconds = 0.0
        """Wall seconds spent on the batches so far where the consumer makes them itself; those of processes
        are unknown."""
        feed = recorder.feed
        with contextlib.nullcontext() if draws else _undrawn():
            if isinstance(feed, StreamFeed):
                recorder.number, start = feed.begin_in(workers)
                self._batches = make_iterator()
                self._num_yielded = start.batches
                self._epoch = start.epoch
                feed.skip(self._batches, start.batches)
            else:
                self._batches = make_iterator()
        self.number = recorder.number
        """Of the cursor."""
        self._taken = recorder.taken  # of this pass: another one over the same loader may be open beside it

    @property
    def processes(self) -> list[Any]:
        """Worker processes."""
        return getattr(self._batches, "_workers", [])

    def __next__(self) -> Made:
        received = getattr(self._batches, "_rcvd_idx", None)
        started = perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration as stop:
            self._check_complete(stop)
            raise
        except BaseException:
            # The next call goes on with the batch behind the one that failed, as torch's does; a timeout has
            # received none.
            self._is_silent = received is not None and received == self._batches._rcvd_idx  # type: ignore[attr-defined]  # torch's iterator
            if not self._is_silent:
                self._num_yielded += 1
                if self._taken:
                    self._taken.popleft()
            raise
        self._is_silent = False
        self._num_yielded += 1
        if not self._workers:
            self.busy_seconds += perf_counter() - started
        if isinstance(self._recorder.feed, StreamFeed):
            mark = StreamMark(self._epoch, self._num_yielded, workers=self._workers)
            return self._finish(batch, None, mark)
        ids, mark = self._taken.popleft()
        return self._finish(batch, ids, mark)

    def close(self) -> None:
        """End worker processes that do not persist; at once where one may hang, for which torch would wait 5
        s."""
        if not self._workers or self._keeps_workers:
            return
        if self._is_silent:
            _forget(self._batches)
            for process in self.processes:
                process.terminate()
        self._batches._shutdown_workers()  # type: ignore[attr-defined]  # torch's iterator

    def dropped(self) -> None:
        """End the workers: an error's traceback may have kept the iterator alive until a garbage collection, in
        which torch waits 5 s for each worker whose queue was collected before it."""
        with contextlib.suppress(RuntimeError):  # torch says so wherever it is when a worker was killed
            self.close()

    def _check_complete(self, stop: StopIteration) -> None:
        """Ids without a batch: this is no end, but what a row or collator raised, which torch raises again
        here."""
        if self._taken:
            raise RuntimeError(
                f"Making item {self._num_yielded} ({self._taken[0][0]!r:.200}) raised StopIteration, which "
                "would have ended the epoch early without a word. Raise another error, or leave the item "
                "out of the sampler."
            ) from stop


def _forget(iterator: Any) -> None:
    """Keep torch's signal handler from raising in the main thread when the workers of its iterator are
    terminated."""
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


class _undrawn:
    """Puts torch's global random state back at the end."""

    def __enter__(self) -> None:
        self._state = torch.get_rng_state()

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self._state)
