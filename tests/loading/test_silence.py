"""A source that falls silent: `timeout` speaks in time, and `close()` ends a pass that waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from dropin_cases import Rows
from loader_cases import token_rows
from torch.utils.data import IterableDataset

from multipack import (
    DataLoader,
    MultipackBatchSampler,
    PackedCollator,
    StreamPacker,
    TokenDataset,
)
from multipack.loading.prefetch import Prefetcher

RELEASE = threading.Event()  # ends what hangs in a thread, so that no test leaves one behind
TIMEOUT_S = 1.0
LATE_S = 2.0  # what a loaded machine may add; torch waits 5 s for each silent process that it ends


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    RELEASE.set()
    deadline = time.monotonic() + 10
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    RELEASE.clear()


def silent_row(index: int) -> int:
    if index >= 4:
        RELEASE.wait(60)
    return index


class SilentStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return map(silent_row, range(12))


class SilentTokens(IterableDataset[Any]):
    """Token rows for two batches, then silence."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for row in range(100):
            if row == 40:
                RELEASE.wait(60)
            yield {"input_ids": [row] * 30}


class SilentSampler:
    """A foreign sampler that falls silent itself."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return map(silent_row, range(12))


class SilentCollator(PackedCollator):
    """Our collator over our data set, hanging in the third batch."""

    def __call__(self, rows: Any) -> Any:
        if 5 in rows.source_rows():
            RELEASE.wait(60)
        return super().__call__(rows)


def hanging(what: str, **way: Any) -> Any:
    if what == "rows":
        return DataLoader(Rows(silent_row), batch_size=2, **way)
    if what == "stream":
        return DataLoader(SilentStream(), batch_size=2, **way)
    if what == "sampler":
        return DataLoader(range(12), batch_size=2, sampler=SilentSampler(), **way)
    packer = StreamPacker(SilentTokens(), 100, num_replicas=1, rank=0, pool_size=4)
    return DataLoader(packer, batch_size=None, collate_fn=PackedCollator(), **way)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize("what", ["rows", "stream", "sampler", "packed stream"])
def test_timeout_arrives_in_time_and_leaves_no_process(what: str, worker_type: Any) -> None:
    if (what, worker_type) == ("sampler", "process"):
        pytest.skip("torch asks its sampler in the caller's thread there, where nothing can watch it")
    workers = 1 if what == "packed stream" else 2
    before = set(children())
    loader = hanging(what, num_workers=workers, worker_type=worker_type, timeout=TIMEOUT_S)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"timed out|did not come") as caught:  # noqa: PT012  (until it is silent)
        for _ in range(30):
            asked = time.monotonic()
            next(iterator)
    waited = time.monotonic() - asked
    assert TIMEOUT_S * 0.9 < waited < TIMEOUT_S + LATE_S
    started = time.monotonic()
    del iterator, loader, caught
    assert time.monotonic() - started < LATE_S
    deadline = time.monotonic() + 5
    while set(children()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(children()) - before


class Pipe:
    """An iterator over what others put in; `close` wakes whoever waits in it, as that of a socket or a file
    does."""

    def __init__(self, items: list[Any]) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waiting, self.closed = threading.Event(), threading.Event()
        for item in items:
            self.items.put(item)

    def __iter__(self) -> Pipe:
        return self

    def __next__(self) -> Any:
        if self.items.empty():
            self.waiting.set()
        item = self.items.get(timeout=30)
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        self.closed.set()
        self.items.put(None)


class PipeStream(IterableDataset[Any]):
    """Opens a pipe for each pass."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.pipes: list[Pipe] = []

    def __iter__(self) -> Iterator[Any]:
        self.pipes.append(Pipe(self.items))
        return self.pipes[-1]


class PipeSampler:
    """A foreign sampler that waits for ids."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.pipes: list[Pipe] = []

    def __iter__(self) -> Iterator[int]:
        self.pipes.append(Pipe(self.ids))
        return self.pipes[-1]

    def __len__(self) -> int:
        return 100


def opened(what: str) -> tuple[Any, Any]:
    """A pass that has taken one batch, and what it reads: a stream, a sampler or a packed stream."""
    if what == "packed stream":
        source: Any = PipeStream([{"input_ids": [row] * 30} for row in range(6)])
        packer = StreamPacker(source, 60, num_replicas=1, rank=0, pool_size=4)
        loader = DataLoader(
            packer, batch_size=None, collate_fn=PackedCollator(), num_workers=1, worker_type="thread"
        )
    elif what == "sampler":
        source = PipeSampler([0, 1])
        loader = DataLoader(range(10), batch_size=None, sampler=source, num_workers=1, worker_type="thread")
    else:
        source = PipeStream(list(range(4)))
        loader = DataLoader(source, batch_size=2, num_workers=1, worker_type="thread")
    iterator = iter(loader)
    next(iterator)
    return iterator, source


_THREADS_BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_other_tests() -> None:
    _THREADS_BEFORE.clear()
    _THREADS_BEFORE.update(loader_threads())


def loader_threads() -> list[threading.Thread]:
    """Threads that the test itself has started; an error's traceback may keep passes of other tests alive."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("multipack-loader")]
    return [thread for thread in ours if thread not in _THREADS_BEFORE]


@pytest.mark.parametrize("what", ["stream", "sampler", "packed stream"])
def test_close_closes_a_source_that_blocks(what: str) -> None:
    iterator, source = opened(what)
    assert source.pipes[0].waiting.wait(10)
    started = time.monotonic()
    iterator.close()
    assert source.pipes[0].closed.is_set()
    assert time.monotonic() - started < LATE_S
    assert not loader_threads()


def test_a_prefetcher_closes_a_source_that_blocks() -> None:
    source = PipeStream([1, 2])
    with Prefetcher(source, depth=4) as prefetcher:
        iterator = iter(prefetcher)
        assert next(iterator) == 1
        assert source.pipes[0].waiting.wait(10)
    assert source.pipes[0].closed.is_set()


def test_rows_that_hang_in_our_collator_time_out() -> None:
    rows = TokenDataset(token_rows())
    loader = DataLoader(
        rows,
        batch_sampler=MultipackBatchSampler(rows.lengths, 256, shuffle=False),
        collate_fn=SilentCollator(),
        num_workers=1,
        worker_type="thread",
        timeout=TIMEOUT_S,
    )
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not come"):
        list(loader)
    assert time.monotonic() - started < TIMEOUT_S + LATE_S
