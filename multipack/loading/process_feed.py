"""torch's worker processes behind our queue.

torch takes ids ahead for its workers and returns batches without them. The feed stands between its iterator and the sampler, and
remembers for each batch what must be known when it is yielded: batches come back in the order in which their ids were taken.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multipack.loading.position import Position

_HANDOVER_LIMIT_S = 60.0
_NO_BINS = (0,)


@dataclass(frozen=True, slots=True)
class FromProcess:
    """A batch that a worker process made."""

    batch: Any
    bin_offsets: Sequence[int]


class ProcessFeed:
    """The sampler that torch's iterator sees, and the batches it makes."""

    def __init__(self, index_sampler: Any, position: Position, *, has_ids: bool, persistent: bool) -> None:
        self._index_sampler = index_sampler
        self._position = position
        self._has_ids = has_ids
        self._persistent = persistent
        self._taken: deque[tuple[Sequence[int], Any]] = deque()
        # Persistent workers serve pass after pass through one iterator, which is not safe for threads: the thread of an older
        # pass may still be inside it. Whoever holds `_turn` may use it, and only the newest pass does.
        self._turn = threading.Lock()
        self._pass = 0

    def __iter__(self) -> Iterator[Any]:
        self._taken = deque()
        return self._remember(iter(self._position.pairs()), self._taken)

    def __len__(self) -> int:
        return len(self._index_sampler)

    def _remember(
        self, pairs: Iterator[tuple[Any, Any]], taken: deque[tuple[Sequence[int], Any]]
    ) -> Iterator[Any]:
        for ids, mark in pairs:
            taken.append((getattr(ids, "bin_offsets", _NO_BINS), mark))
            yield ids

    def open(self, make_iterator: Callable[[], Iterator[Any]]) -> Generator[tuple[FromProcess, Any]]:
        """Begin a pass with torch's iterator, in the caller's thread: torch minds its children's signals only in the main one.

        Raises:
            RuntimeError: the thread of an earlier pass over the same workers does not let go of them.
        """
        if not self._turn.acquire(timeout=_HANDOVER_LIMIT_S):
            raise RuntimeError(
                f"The earlier pass over the same persistent workers has waited {_HANDOVER_LIMIT_S:g} s for a batch, so a new one "
                "cannot begin. Close its iterator, look for what its workers hang on, or set persistent_workers=False."
            )
        try:
            self._pass += 1
            self._position.begin()
            return self._read(make_iterator(), self._pass)
        finally:
            self._turn.release()

    def _read(self, batches: Iterator[Any], number: int) -> Generator[tuple[FromProcess, Any]]:
        try:
            for count in itertools.count():
                with self._turn:
                    if self._pass != number:
                        return
                    try:
                        batch = next(batches)
                    except StopIteration as stop:
                        # Ids without a batch: this is no end, but what a row or collator raised, which torch raises again here.
                        if self._taken:
                            raise RuntimeError(
                                f"Making item {count} in a worker process raised StopIteration, which would have ended the epoch "
                                "early without a word. Raise another error, or leave the item out of the sampler."
                            ) from stop
                        return
                    bin_offsets, mark = self._taken.popleft() if self._has_ids else (_NO_BINS, None)
                yield FromProcess(batch, bin_offsets), mark
                del batch
        finally:
            # torch ends its workers when its iterator dies, but the traceback of a worker's error keeps that alive, and a garbage
            # collection then waits 5 s for workers whose queues it has closed before.
            if not self._persistent:
                batches._shutdown_workers()  # type: ignore[attr-defined]
