"""Blocks of a store on local disk: fetched before they are needed, evicted by when they are needed next.

The one rule: the plan decides. It says which batches come, so the next block to fetch and the block to give
up are known, not guessed; what the training loop asks for is never evicted for something that is needed
later.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import ipc

Block = int

_NEVER = 1 << 62
_SUFFIX = ".arrow"

_logger = logging.getLogger(__name__)


class Fetcher(Protocol):
    """Where blocks come from."""

    def key(self, block: Block) -> str:
        """Names the content of a block: another content has another key."""

    def fetch(self, block: Block) -> pa.Table:
        """The block, from the store."""


@dataclass
class Traffic:
    """What a cache has done. Plain counters, for reports."""

    blocks_fetched: int = 0
    """Blocks that came from the store. Above the number of blocks an epoch: raise `cache_bytes` or
    `shuffle_block`."""
    blocks_found: int = 0
    """Blocks that were on disk already when they were asked for first, such as after a restart."""
    bytes_fetched: int = 0
    """Uncompressed bytes of the blocks fetched."""
    blocks_waited_for: int = 0
    """Blocks that were not there when a batch needed them. Many, beside a loader that waits: raise
    `fetch_threads`."""


@dataclass
class _State:
    """All that threads share, guarded by the condition of the cache."""

    # Invariant: a block is in at most one of `sizes` (its file is whole, on disk, and counted in `used`) and
    # `fetching`.
    sizes: dict[Block, int] = field(default_factory=dict)
    fetching: set[Block] = field(default_factory=set)
    failed: dict[Block, BaseException] = field(default_factory=dict)
    used: int = 0
    batches: deque[tuple[int, frozenset[Block]]] = field(default_factory=deque)
    """Batches to come: number and blocks."""
    uses: dict[Block, deque[int]] = field(default_factory=dict)
    """Numbers of the batches to come that need a block."""
    next_number: int = 0
    stopped: bool = False


class BlockCache:
    """Blocks on disk, up to a number of bytes.

    Args:
        folder: of this process alone, see `own_folder`. What is in it under a known key is used again.
        cache_bytes: most bytes on disk, beside blocks of the batch in hand.
        fetcher: where blocks come from; called in several threads.
        threads: blocks that are fetched at once, ahead of the plan.
    """

    def __init__(self, folder: Path, cache_bytes: int, fetcher: Fetcher, threads: int) -> None:
        self.folder = folder
        self.cache_bytes = cache_bytes
        self.traffic = Traffic()
        self._fetcher = fetcher
        self._num_threads = threads
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._state = _State()
        self._forget_the_rest_of_a_fetch()
        weakref.finalize(self, _stop, self._changed, self._state)
        self._left = {path.name: path.stat().st_size for path in self.folder.glob(f"*{_SUFFIX}")}
        self._state.used = sum(self._left.values())

    def _forget_the_rest_of_a_fetch(self) -> None:
        for path in self.folder.glob("*.part"):
            path.unlink()

    def expect(self, blocks: Sequence[Block]) -> None:
        """A batch that needs these blocks comes after those that were announced before it."""
        with self._changed:
            state = self._state
            number, state.next_number = state.next_number, state.next_number + 1
            state.batches.append((number, frozenset(blocks)))
            for block in set(blocks):
                state.uses.setdefault(block, deque()).append(number)
            self._start_threads()
            self._changed.notify_all()

    def forget(self) -> None:
        """Nothing is expected any more: the pass over the plan has ended, or begins elsewhere."""
        with self._changed:
            self._state.batches.clear()
            self._state.uses.clear()
            self._state.failed.clear()

    @property
    def expected(self) -> int:
        """Batches that were announced and not yet taken."""
        return len(self._state.batches)

    def take(self, blocks: Sequence[Block]) -> list[pa.Table]:
        """These blocks, for the batch that comes next. They stay readable for as long as they are
        referenced."""
        tables = [self._get(block) for block in blocks]
        with self._changed:
            self._passed(frozenset(blocks))
            self._changed.notify_all()
        return tables

    def close(self) -> None:
        """End the threads. The files stay."""
        with self._changed:
            self._state.stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1)

    def _passed(self, blocks: frozenset[Block]) -> None:
        """The batch that was announced with these blocks is no longer to come. Batches are taken in about
        their order."""
        batches = self._state.batches
        place = next((i for i, (_, announced) in enumerate(batches) if announced == blocks), None)
        if place is None:
            return
        number = batches[place][0]
        del batches[place]
        for block in blocks:
            uses = self._state.uses[block]
            uses.remove(number)
            if not uses:
                del self._state.uses[block]

    def _get(self, block: Block) -> pa.Table:
        with self._changed:
            waited = False
            while block in self._state.fetching:
                waited = True
                self._changed.wait()
            error = self._state.failed.pop(block, None)
            if error is not None:
                raise error
            is_there = block in self._state.sizes
            if not is_there:
                self._state.fetching.add(block)
            self.traffic.blocks_waited_for += waited or not is_there
        return self._open(block) if is_there else self._bring(block)

    def _bring(self, block: Block) -> pa.Table:
        """Bring a block to disk; it is in `fetching`, and is in `sizes` afterwards."""
        try:
            table, size = self._find(block) or self._fetch(block)
        except BaseException:
            with self._changed:
                self._state.fetching.discard(block)
                self._changed.notify_all()
            raise
        with self._changed:
            self._state.fetching.discard(block)
            self._state.sizes[block] = size
            self._state.used += size
            self._make_room(spare=block)
            self._changed.notify_all()
        return table

    def _fetch(self, block: Block) -> tuple[pa.Table, int]:
        fetched = self._fetcher.fetch(block)
        path = self._path(block)
        size = _write(path, fetched)
        with self._changed:
            self.traffic.blocks_fetched += 1
            self.traffic.bytes_fetched += fetched.nbytes
        return _map(path), size

    def _find(self, block: Block) -> tuple[pa.Table, int] | None:
        """A block that an earlier process left, if it is whole."""
        path = self._path(block)
        with self._changed:
            size = self._left.pop(path.name, None)
            self._state.used -= size or 0
        if size is None:
            return None
        if not _is_whole(path):
            _logger.warning("%s is damaged; its block is fetched again.", path)
            path.unlink(missing_ok=True)
            return None
        with self._changed:
            self.traffic.blocks_found += 1
        return _map(path), size

    def _open(self, block: Block) -> pa.Table:
        try:
            return _map(self._path(block))
        except FileNotFoundError:  # another program cleared the folder, or it was evicted just now
            with self._changed:
                self._state.used -= self._state.sizes.pop(block, 0)
            return self._get(block)

    def _make_room(self, spare: Block) -> None:
        """Evict what is needed last, until the rest fits. The caller holds the lock."""
        state = self._state
        while state.used > self.cache_bytes and self._left:
            name, size = self._left.popitem()
            (self.folder / name).unlink(missing_ok=True)
            state.used -= size
        while state.used > self.cache_bytes and (
            others := [block for block in state.sizes if block != spare]
        ):
            last = max(others, key=self._next_use)
            state.used -= state.sizes.pop(last)
            self._path(last).unlink(missing_ok=True)

    def _next_use(self, block: Block) -> int:
        uses = self._state.uses.get(block)
        return uses[0] if uses else _NEVER

    def _path(self, block: Block) -> Path:
        return self.folder / (
            hashlib.blake2b(self._fetcher.key(block).encode(), digest_size=16).hexdigest() + _SUFFIX
        )

    # Threads that fetch ahead.

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads and not self._state.stopped:
            arguments = weakref.ref(self), self._changed, self._state
            thread = threading.Thread(
                target=_fetch_ahead, args=arguments, name="multipack-fetch", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _next_wanted(self) -> Block | None:
        """The block that is needed first of those that are missing, if it may be fetched now: those of the
        next batch always, others where nothing has to go that is needed again. What is needed again is thus
        given up as late as can be."""
        state = self._state
        for place, (_, blocks) in enumerate(state.batches):
            for block in sorted(blocks):
                if block not in state.sizes and block not in state.fetching and block not in state.failed:
                    return block if place == 0 or self._has_room() else None
        return None

    def _has_room(self) -> bool:
        """Whether a block of usual size fits beside all that is needed again."""
        state = self._state
        if not state.sizes:
            return not state.fetching  # until one is here, their size is unknown
        kept = sum(size for block, size in state.sizes.items() if block in state.uses)
        return kept + max(state.sizes.values()) * (len(state.fetching) + 1) <= self.cache_bytes


# Invariant: a thread holds its cache only while it looks for a block or brings one, so a cache that is
# dropped ends its threads.
def _fetch_ahead(cache_of: weakref.ref[BlockCache], changed: threading.Condition, state: _State) -> None:
    while (found := _await_next(cache_of, changed, state)) is not None:
        cache, block = found
        try:
            cache._bring(block)
        except BaseException as error:  # noqa: BLE001  # raised again where the block is asked for
            with changed:
                state.failed[block] = error
                changed.notify_all()
        del cache, found


def _await_next(
    cache_of: weakref.ref[BlockCache], changed: threading.Condition, state: _State
) -> tuple[BlockCache, Block] | None:
    """The next block to fetch, marked as being fetched; None when the cache is closed or dropped."""
    with changed:
        while not state.stopped and (cache := cache_of()) is not None:
            block = cache._next_wanted()
            if block is not None:
                state.fetching.add(block)
                return cache, block
            del cache
            changed.wait()
    return None


def _stop(changed: threading.Condition, state: _State) -> None:
    """Wake the threads of a cache that is gone. The condition's lock may be taken again by the thread that
    holds it."""
    with changed:
        state.stopped = True
        changed.notify_all()


def _write(path: Path, table: pa.Table) -> int:
    """Write a block whole or not at all; returns its bytes. The last 16 bytes are a digest of the rest."""
    part = path.with_suffix(f".{threading.get_ident()}.part")
    try:
        with pa.OSFile(str(part), "wb") as file, ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        with part.open("r+b") as file:
            digest = _digest(file)
            file.seek(0, os.SEEK_END)
            file.write(digest)
            size = file.tell()
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


def _digest(file: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.digest()


def _is_whole(path: Path) -> bool:
    raw = path.read_bytes()
    return len(raw) > 16 and hashlib.blake2b(memoryview(raw)[:-16], digest_size=16).digest() == raw[-16:]


def _map(path: Path) -> pa.Table:
    mapped = pa.memory_map(str(path)).read_buffer()
    return ipc.open_file(mapped.slice(0, mapped.size - 16)).read_all()


class OwnFolder:
    """A folder below `parent` that no other process uses, for as long as the object lives.

    Folders of processes that ended are taken over with what they hold.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        for path, file in _lockable(parent):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            self.path, self._lock = path, file
            return

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()


def _lockable(parent: Path) -> Iterator[tuple[Path, int]]:
    number = 0
    while True:
        path = parent / f"process-{number}"
        path.mkdir(exist_ok=True)
        yield path, os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        number += 1
