"""Make batches in background threads, in order and never more than `depth` ahead.

The one rule: items taken from the source and not yet yielded <= depth. A thread needs a slot before it takes
an item, and the consumer gives the slot back when it hands the item out. All that consumer and threads share
are two queues written in C (`queue.SimpleQueue`), whose put and get are atomic: Ctrl-C may strike, or a
garbage collection run a finalizer, between any two instructions without leaving a lock held.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar

from multipack.loading.ambient import Ambient

T = TypeVar("T")

_HEARTBEAT_S = 1.0  # how often a waiting consumer looks whether its threads are alive
_JOIN_LIMIT_S = 1.0  # how long closing waits for a thread that is inside the user's code


class Prefetcher(Generic[T]):
    """Iterate over `source` ahead of the consumer. Each `iter()` is independent and starts its threads at its
    first `next()`.

    Args:
        source: anything iterable. `iter(source)` is called in the consumer's thread at the first `next()`;
            items are taken in order, by one thread at a time.
        depth: items that may be taken and not yet yielded; 0 works synchronously, with no thread.
        threads: how many threads run `map` at once; the order of the items is kept. At most `depth` are
            started.
        map: what makes a batch of an item, in the threads; `None` yields the items as they are.
        timeout: seconds the consumer waits for one item before it raises with the stacks of the threads; 0
            waits without a limit. Needs a thread, so it is an error with `depth=0`.
        name: of the threads.

    Any exception of `source` or `map`, be it SystemExit or KeyboardInterrupt, is raised by `next()` with its
    traceback, after the items before it. An Exception ends that `next()` only, and the item behind it comes
    next (a generator has none); any other one finishes the iterator. A StopIteration out of `map` is an
    error, never an end.

    What is bound to the thread that first calls `next()` holds in the threads as well: grad mode, autocast,
    torch's default device and context variables.

    `close()`, leaving a `with` block, dropping the iterator, an exception in `next()` and the end of the
    interpreter stop the threads; only a call into user's code that is under way is finished. A generator, or
    an iterator that `source` made, is closed with them. In a forked child a running iterator raises
    RuntimeError; new ones work.

    Raises:
        ValueError: depth or timeout negative, threads below 1, or a timeout with depth 0.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        depth: int,
        threads: int = 1,
        map: Callable[[Any], T] | None = None,
        timeout: float = 0.0,
        name: str = "multipack-prefetch",
    ) -> None:
        if depth < 0:
            raise ValueError(
                f"depth={depth} is negative: give the number of items to hold ready, or 0 for none."
            )
        if threads < 1:
            raise ValueError(f"threads={threads}: at least one thread is needed; depth=0 works without any.")
        if timeout < 0:
            raise ValueError(f"timeout={timeout} is negative: give seconds, or 0 to wait without a limit.")
        if timeout > 0 and depth == 0:
            raise ValueError(
                f"timeout={timeout} with depth=0: there is no thread to enforce it. Give a depth, or no "
                "timeout."
            )
        self.source = source
        self.depth = depth
        self.threads = threads
        self.map = map
        self.timeout = timeout
        self.name = name
        self._iterators: weakref.WeakSet[PrefetchIterator[T]] = weakref.WeakSet()

    def __iter__(self) -> PrefetchIterator[T]:
        iterator = PrefetchIterator(self)
        self._iterators.add(iterator)
        return iterator

    def close(self) -> None:
        """Close every iterator made so far."""
        for iterator in list(self._iterators):
            iterator.close()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PrefetchIterator(Iterator[T]):
    """One pass over a Prefetcher's source. Not for use by several consumers at once, except that any thread
    may close it."""

    def __init__(self, prefetcher: Prefetcher[T]) -> None:
        self._work = _Work(prefetcher)
        self._early: dict[int, _Outcome] = {}  # made by the threads before it was their turn
        self._next_index = 0
        self._finished = False
        self.busy_seconds = 0.0
        """Wall seconds the threads spent on the items yielded so far, summed over the threads."""
        self._finalizer = weakref.finalize(self, self._work.stop)
        self._finalizer.atexit = False  # `_stop_all` ends them then

    @property
    def ready(self) -> int:
        """Batches made and waiting now. Mostly 0: the threads are slower than the consumer. Mostly `depth`:
        they are faster."""
        return self._work.made.qsize() + len(self._early)

    def __next__(self) -> T:
        if self._finished:
            raise StopIteration
        try:
            self._work.check_process()
            outcome = self._take()
        except BaseException:
            # Ctrl-C, or a silent or dead thread: tell the threads, but do not wait for one that hangs.
            self._finished = True
            self._work.stop()
            raise
        if outcome is None:  # closed by another thread, which also waits for the threads
            self._finished = True
            raise StopIteration
        if outcome.is_end:
            self.close()
            raise StopIteration
        self.busy_seconds += outcome.seconds
        if outcome.error is not None:
            if outcome.is_final:
                self.close()
            try:
                raise outcome.error
            finally:
                del outcome  # or this frame, the error and its traceback would keep each other alive
        return outcome.value  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the threads and wait up to a second for each to leave the user's code. No more is read. May be
        called twice."""
        self._finished = True
        self._work.stop()
        self._work.interrupt_source()
        self._work.join(_JOIN_LIMIT_S)
        self._early.clear()
        self._work.drop_made()

    def __enter__(self) -> PrefetchIterator[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> _Outcome | None:
        """The next outcome in order; None when somebody closed this iterator meanwhile."""
        work = self._work
        work.begin()
        if work.depth == 0:
            return work.make()
        while self._next_index not in self._early:
            outcome = self._wait()
            if outcome is None:
                return None
            self._early[outcome.index] = outcome
        outcome = self._early.pop(self._next_index)
        self._next_index += 1
        work.slots.put(None)
        return outcome

    def _wait(self) -> _Outcome | None:
        work = self._work
        started = monotonic()
        while True:
            patience = work.timeout - (monotonic() - started) if work.timeout else _HEARTBEAT_S
            try:
                return work.made.get(timeout=max(0.0, min(patience, _HEARTBEAT_S)))
            except Empty:
                if work.timeout and monotonic() - started >= work.timeout:
                    raise RuntimeError(
                        f"Item {self._next_index} did not come for {work.timeout:g} s, so its source may "
                        f"hang. Give a longer timeout, or see where it stands:\n{work.stacks()}"
                    ) from None
                if not any(thread.is_alive() for thread in work.threads) and work.made.empty():
                    raise RuntimeError(
                        f"All {len(work.threads)} threads of {work.name} are gone without a word before item "
                        f"{self._next_index}: this process cannot get more items. Make a new iterator."
                    ) from None


@dataclass(slots=True)
class _Outcome:
    """What a thread has to say about one item: a batch, an error, or that there are no more."""

    index: int
    value: Any = None
    error: BaseException | None = None
    is_final: bool = False
    """Nothing comes behind the error."""
    is_end: bool = False
    seconds: float = 0.0


class _Work:
    """What an iterator and its threads share. It knows nothing of the iterator, so dropping that one ends the
    threads."""

    def __init__(self, prefetcher: Prefetcher[Any]) -> None:
        self.source = prefetcher.source
        self.depth = prefetcher.depth
        self.map = prefetcher.map
        self.timeout = prefetcher.timeout
        self.name = prefetcher.name
        self.num_threads = min(prefetcher.threads, prefetcher.depth)
        self.threads: list[threading.Thread] = []
        self.iterator: Iterator[Any] | None = None
        self.ambient: Ambient | None = None
        self.begun = False
        self.stopped = False
        self.pid = os.getpid()

        # Invariant: taken from the source and not yet yielded <= depth. There are `depth` slots; a thread
        # gets one before it takes an item and the consumer puts it back as it hands the item out. After the
        # end one slot goes from thread to thread so that each of them wakes up and sees `stopped`. `None` in
        # `made` wakes the consumer in the same way.
        self.slots: SimpleQueue[None] = SimpleQueue()
        self.made: SimpleQueue[_Outcome | None] = SimpleQueue()
        for _ in range(self.depth):
            self.slots.put(None)

        # Guards the source: `taken` counts its items, and after `exhausted` it is not asked again.
        self.turn = threading.Lock()
        self.taken = 0
        self.exhausted = False
        self.running = 0

    def is_foreign(self) -> bool:
        """True in a fork, where the threads are missing and their queues may be locked for good."""
        return bool(self.threads) and os.getpid() != self.pid

    def check_process(self) -> None:
        if self.is_foreign():
            raise RuntimeError(
                f"This iterator was made by process {self.pid} and its threads are not in this fork (process "
                f"{os.getpid()}). Make a new iterator here."
            )

    def begin(self) -> None:
        """Open the source and start the threads, once."""
        if self.begun or self.stopped:
            return
        self.begun = True
        self.pid = os.getpid()
        self.iterator = iter(self.source)
        self.ambient = Ambient.here() if self.num_threads else None
        if self.num_threads:
            _running.add(self)
        self.running = self.num_threads
        for number in range(self.num_threads):
            name = f"{self.name}-{number}"
            thread = threading.Thread(target=_run, args=(self,), name=name, daemon=True)
            self.threads.append(thread)
            thread.start()

    def wait_for_slot(self) -> bool:
        self.slots.get()
        if self.stopped:
            self.slots.put(None)
        return not self.stopped

    def make(self) -> _Outcome | None:
        """Take one item and make a batch of it. None when there is nothing left to take."""
        with self.turn:
            if self.stopped or self.exhausted or self.iterator is None:
                return None
            started = perf_counter()
            index = self.taken
            self.taken += 1
            try:
                item = next(self.iterator)
            except StopIteration:
                self.exhausted = True
                return _Outcome(index, is_end=True)
            except BaseException as error:  # noqa: BLE001  (the consumer raises it)
                return self._failed(index, error)
        try:
            batch = item if self.map is None else self.map(item)
        except StopIteration as error:
            wrong = RuntimeError(
                f"Making item {index} ({item!r:.200}) raised StopIteration, which would have ended the epoch "
                "early without a word. Raise another error, or leave the item out of the sampler."
            )
            wrong.__cause__ = error
            return _Outcome(index, error=wrong)
        except BaseException as error:  # noqa: BLE001  (the consumer raises it)
            return self._failed(index, error)
        return _Outcome(index, batch, seconds=perf_counter() - started)

    def _failed(self, index: int, error: BaseException) -> _Outcome:
        """What an item became that raised: only what is no Exception, such as Ctrl-C, ends the pass."""
        is_final = not isinstance(error, Exception)
        self.exhausted = self.exhausted or is_final
        return _Outcome(index, error=error, is_final=is_final)

    def fail(self, error: BaseException) -> None:
        """Put an error that belongs to no item where the next item would have come."""
        with self.turn:
            self.exhausted = True
            self.made.put(_Outcome(self.taken, error=error, is_final=True))
            self.taken += 1

    def leave(self) -> None:
        """A thread ends; the last one closes what it read."""
        with self.turn:
            self.running -= 1
            if self.running:
                return
        self.close_source()

    def interrupt_source(self) -> None:
        """End a source that a thread waits in, by its own `close`; a generator that runs cannot be closed
        from outside."""
        iterator = self.iterator
        if iterator is self.source or isinstance(iterator, Generator) or self.is_foreign():
            return
        close = getattr(iterator, "close", None)
        if callable(close):
            close()

    def close_source(self) -> None:
        iterator, self.iterator = self.iterator, None
        # A plain iterator that the caller passed in stays the caller's; all else was made for this pass or is
        # used up by it.
        if iterator is not self.source or isinstance(iterator, Generator):
            close = getattr(iterator, "close", None)
            if callable(close):
                close()

    def stop(self) -> None:
        """Tell the threads to end, without waiting and without taking a lock: finalizers call this at any
        point of any thread."""
        if self.is_foreign():
            return
        self.stopped = True
        self.slots.put(None)
        self.made.put(None)
        if self.num_threads == 0 and self.iterator is not None:
            self.close_source()

    def join(self, limit_s: float) -> None:
        if self.is_foreign():
            return
        deadline = monotonic() + limit_s
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))

    def drop_made(self) -> None:
        """Free the batches that are left."""
        if self.is_foreign():
            return
        with contextlib.suppress(Empty):
            while True:
                self.made.get_nowait()
        self.made.put(None)

    def stacks(self) -> str:
        """Where each living thread stands now."""
        frames = {thread.name: sys._current_frames().get(thread.ident or 0) for thread in self.threads}
        stacks = [f"Thread {name}:\n" + "".join(traceback.format_stack(f)) for name, f in frames.items() if f]
        return "".join(stacks) or "(no thread is left)"


def _run(work: _Work) -> None:
    """The life of one thread. It must not hold a batch while it waits, nor a reference to the iterator
    ever."""
    try:
        assert work.ambient is not None
        work.ambient.run(_make_batches, work)
    except BaseException as error:  # noqa: BLE001  (the consumer raises it)
        work.fail(error)
    finally:
        work.leave()


def _make_batches(work: _Work) -> None:
    while not work.exhausted and work.wait_for_slot():
        outcome = work.make()
        if outcome is None:
            return
        work.made.put(outcome)
        del outcome


_running: weakref.WeakSet[_Work] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End all threads before the interpreter takes itself apart; daemon threads inside C++ code would crash
    it."""
    works = list(_running)
    for work in works:
        work.stop()
    deadline = monotonic() + _JOIN_LIMIT_S
    for work in works:
        work.join(max(0.0, deadline - monotonic()))
