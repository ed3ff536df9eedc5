"""Shards in an object store, read as one data set.

The one rule: a row has the same number whatever is fetched or cached, so plans, states and resumes know
nothing of the store. Opening reads footers and lengths; values are fetched block by block, ahead of the plan.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from multipack.arguments import check_choice, whole_number
from multipack.data import blocks
from multipack.data.block_cache import BlockCache, OwnFolder, Traffic
from multipack.data.columns import Columns, is_number, is_tokens
from multipack.data.objects import Store, StoredObject, store_of
from multipack.data.overlong import narrow
from multipack.data.sources import Source
from multipack.data.tables import read_columns, row_lengths

_T = TypeVar("_T")

_AHEAD_BATCHES = 256
"""Batches whose blocks are known to the cache. How far ahead blocks are fetched is for the cache to say."""

_logger = logging.getLogger(__name__)


def remote(
    urls: str | Iterable[str],
    *,
    format: blocks.Format | None = None,
    lengths: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = 20 << 30,
    filesystem: Any = None,
    patience: float = 60.0,
    fetch_threads: int = 4,
) -> RemoteFiles:
    """Parquet, Arrow or JSON-lines shards of any file system of Arrow or fsspec, for TokenDataset.

    Args:
        urls: an object, a pattern with `*`, or a folder, such as "s3://bucket/train/"; or several of them.
            Shards are read as one after the other, those of a pattern or folder in the order of their names.
        format: "parquet", "arrow" or "jsonl"; None to go by the names.
        lengths: a column with the number of tokens of each row. Without it lengths come from the offsets of
            Arrow files; of Parquet and JSON lines the tokens are read once, which is said, and their lengths
            kept in `cache_dir`.
        cache_dir: where fetched blocks are kept; None for `multipack` in the user's cache folder.
        cache_bytes: most bytes of blocks that this process keeps on disk, uncompressed.
        filesystem: of pyarrow or fsspec, with credentials; None to find it by the URL. Arrow's own take what
            the environment says (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), or options in the URL.
        patience: seconds for which a failing request is tried again before it is an error.
        fetch_threads: blocks that are fetched at once.

    Batches should touch few blocks: use `shuffle_block=dataset.shuffle_block`, as `packed_dataloader` does.

    Raises:
        FileNotFoundError, PermissionError, ConnectionError: from the store; the message names the URL.
        ValueError: a shard is truncated or of another format, or shards differ in their columns.
    """
    given = [urls] if isinstance(urls, str) else [str(url) for url in urls]
    if not given:
        raise ValueError("no URL is given: give at least one")
    if format is not None:
        check_choice("format", format, ("parquet", "arrow", "jsonl"))
    store, paths = store_of(given, filesystem, patience)
    objects = store.find(paths, tuple(blocks.SUFFIXES) if format is None else ("",))
    if not objects:
        raise FileNotFoundError(
            f"{given[0]} holds no shard with one of the suffixes {', '.join(blocks.SUFFIXES)}."
        )
    shards = tuple(Shard(stored, blocks.format_of(stored.path, format)) for stored in objects)
    folder = Path(cache_dir) if cache_dir is not None else _user_cache() / "multipack"
    return RemoteFiles(
        store,
        shards,
        lengths,
        str(folder.absolute()),
        whole_number("cache_bytes", cache_bytes, 1),
        whole_number("fetch_threads", fetch_threads, 1),
    )


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@dataclass(frozen=True)
class Shard:
    """An object and its format."""

    stored: StoredObject
    form: blocks.Format


@dataclass(frozen=True)
class RemoteFiles:
    """Shards of a store. Pickles as their URLs, and what they were when they were opened."""

    store: Store
    shards: tuple[Shard, ...]
    lengths: str | None
    cache_dir: str
    cache_bytes: int
    fetch_threads: int

    def open_rows(self, column: str, columns: Sequence[str] | None) -> RemoteRows:
        """Rows of the shards, with the columns named; None: all."""
        return RemoteRows(self, column, columns)


@dataclass(frozen=True)
class _Blocks:
    """Where the rows of all blocks are."""

    shards: npt.NDArray[np.int64]
    """Shard of each block."""
    numbers: npt.NDArray[np.int64]
    """Number of the block in its shard."""
    first_rows: npt.NDArray[np.int64]
    """First row of each block, and one more."""


@dataclass
class _Process:
    """What belongs to one process: threads, and a folder that it locks."""

    pid: int
    folder: OwnFolder
    cache: BlockCache
    lock: threading.Lock = field(default_factory=threading.Lock)


class RemoteRows:
    """The rows of remote shards, as TokenDataset reads them."""

    documents: npt.NDArray[np.int64] | None = None

    def __init__(self, files: RemoteFiles, column: str, columns: Sequence[str] | None) -> None:
        self._files = files
        self._column = column
        self._shapes = self._for_each_shard(self._read_shape)
        self._schema = self._common_schema()
        self._wanted = self._choose(columns)
        self._process: _Process | None = None
        self._starting = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Columns as batches have them: tokens, then numbers a row, then objects."""
        kinds = {name: self._schema.field(name).type for name in self._wanted}
        others = [name for name in self._wanted if name != self._column]
        tokens = [name for name in others if is_tokens(kinds[name])]
        scalars = [name for name in others if is_number(kinds[name])]
        return ("input_ids", *tokens, *scalars, *(name for name in others if name not in (*tokens, *scalars)))

    @cached_property
    def lengths(self) -> npt.NDArray[Any]:
        """Tokens of each row; uint16, uint32 or int64."""
        return np.concatenate(self._for_each_shard(self._lengths_of))

    @cached_property
    def _blocks(self) -> _Blocks:
        rows = [
            shape.block_rows if shape.block_rows is not None else (len(self._lengths_of(shard)),)
            for shard, shape in enumerate(self._shapes)
        ]
        counts = [len(part) for part in rows]
        flat = np.array([count for part in rows for count in part], np.int64)
        return _Blocks(
            np.repeat(np.arange(len(rows)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            np.concatenate([[0], np.cumsum(flat)]),
        )

    @property
    def shuffle_block(self) -> int:
        """Rows that lie in one block: what to permute as a whole, so that a window of a plan touches few
        blocks."""
        return max(1, int(np.median(np.diff(self._blocks.first_rows))))

    @property
    def traffic(self) -> Traffic:
        """Counters of the cache of this process."""
        return self._cache.traffic

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[Columns, npt.NDArray[np.int64]]:
        """Columns that hold these rows, and the number of each row in them. Waits for blocks that are not
        there yet."""
        first_rows = self._blocks.first_rows
        needed, place = np.unique(np.searchsorted(first_rows, rows, side="right") - 1, return_inverse=True)
        tables = self._cache.take(needed.tolist())
        sizes = np.array([table.num_rows for table in tables], np.int64)
        shift = np.cumsum(sizes) - sizes - first_rows[needed]
        table = pa.concat_tables(tables)
        return read_columns(Source(table, None, table), self._column), rows + shift[place]

    def read_ahead(self, items: Iterator[_T], rows_of: Callable[[_T], npt.NDArray[np.int64]]) -> Iterator[_T]:
        """The same items, of which some are taken ahead so that their blocks can be fetched meanwhile.

        Args:
            items: what batches are made of.
            rows_of: gives the table rows of an item.
        """
        cache = self._cache
        cache.forget()
        waiting: deque[_T] = deque()
        first_rows = self._blocks.first_rows
        for item in items:
            cache.expect(np.unique(np.searchsorted(first_rows, rows_of(item), side="right") - 1).tolist())
            waiting.append(item)
            if len(waiting) > _AHEAD_BATCHES:
                yield waiting.popleft()
        yield from waiting

    def close(self) -> None:
        """End the threads of this process, and let others use its folder. Reading begins both again."""
        with self._starting:
            if self._process is not None and self._process.pid == os.getpid():
                self._process.cache.close()
                self._process.folder.close()
            self._process = None

    def key(self, block: int) -> str:
        """Names the content of a block."""
        stored = self._files.shards[self._blocks.shards[block]].stored
        number = self._blocks.numbers[block]
        return f"{stored.url}|{stored.size}|{stored.version}|{number}|{self._wanted}"

    def fetch(self, block: int) -> pa.Table:
        """A block from the store, checked against the lengths that the plan was made of."""
        table = self._fetch(int(self._blocks.shards[block]), int(self._blocks.numbers[block]), self._wanted)
        first, last = self._blocks.first_rows[block : block + 2]
        url = self._files.shards[self._blocks.shards[block]].stored.url
        found = self._lengths_in(table, url)
        wrong = np.flatnonzero(found != self.lengths[first:last]) if len(found) == last - first else [0]
        if len(wrong):
            raise ValueError(
                f"{url}, block {self._blocks.numbers[block]}: row {wrong[0]} of {last - first} has another "
                f"length than {self._files.lengths or 'the file'} told when the data set was opened. Write "
                "the lengths again."
            )
        return table

    # Parts.

    def _for_each_shard(self, read: Any) -> list[Any]:
        with ThreadPoolExecutor(self._files.fetch_threads, "multipack-open") as threads:
            return list(threads.map(read, range(len(self._files.shards))))

    def _read_shape(self, shard: int) -> blocks.Shape:
        stored, form = self._files.shards[shard].stored, self._files.shards[shard].form
        return self._files.store.read(stored, lambda file: blocks.read_shape(file, stored.path, form))

    def _common_schema(self) -> pa.Schema:
        first = self._shapes[0].schema
        for shard, shape in zip(self._files.shards, self._shapes, strict=True):
            if not shape.schema.remove_metadata().equals(first.remove_metadata()):
                raise ValueError(
                    f"{shard.stored.url} has the columns {_words(shape.schema)}, but "
                    f"{self._files.shards[0].stored.url} has {_words(first)}: shards of one data set have "
                    "the same columns."
                )
        return first

    def _choose(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        names = self._schema.names if columns is None else columns
        wanted = (self._column, *(name for name in names if name != self._column))
        for name in (*wanted, *filter(None, [self._files.lengths])):
            if name not in self._schema.names:
                raise ValueError(
                    f"{self._files.shards[0].stored.url} has no column {name!r}; it has {self._schema.names}"
                )
        return wanted

    def _fetch(self, shard: int, number: int, columns: Sequence[str]) -> pa.Table:
        stored, form = self._files.shards[shard].stored, self._files.shards[shard].form
        footer = self._shapes[shard].footer
        return self._files.store.read(
            stored, lambda file: blocks.read_block(file, stored.path, form, number, columns, footer)
        )

    def _lengths_in(self, table: pa.Table, url: str) -> npt.NDArray[Any]:
        source = Source(table, None, table)
        try:
            return row_lengths(read_columns(source, self._column), source)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{url}: {error}") from error

    def _lengths_of(self, shard: int) -> npt.NDArray[Any]:
        stored, form = self._files.shards[shard].stored, self._files.shards[shard].form
        key = f"{stored.url}|{stored.size}|{stored.version}|{self._column}|{self._files.lengths}"
        kept = (
            Path(self._files.cache_dir)
            / "lengths"
            / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.npy"
        )
        if kept.exists():
            return np.load(kept, allow_pickle=False)  # type: ignore[no-any-return]  # np.load knows no dtype
        lengths = self._files.store.read(
            stored, lambda file: blocks.read_lengths(file, form, self._column, self._files.lengths)
        )
        if lengths is None:
            lengths = self._lengths_by_reading(shard)
        lengths = narrow(lengths)
        _keep(kept, lengths)
        return lengths

    def _lengths_by_reading(self, shard: int) -> npt.NDArray[np.int64]:
        """Of a format that does not tell lengths: the tokens are read, and dropped again."""
        stored, form = self._files.shards[shard].stored, self._files.shards[shard].form
        _logger.warning(
            "%s: %s does not tell the lengths of lists, so its column %r is read once (%d bytes at most). A "
            "column of lengths, named by lengths=, spares that.",
            stored.url,
            form,
            self._column,
            stored.size,
        )
        block_rows = self._shapes[shard].block_rows
        numbers = range(len(block_rows) if block_rows is not None else 1)
        tables = (self._fetch(shard, number, (self._column,)) for number in numbers)
        parts = [self._lengths_in(table, stored.url).astype(np.int64) for table in tables]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    @property
    def _cache(self) -> BlockCache:
        with self._starting:
            if self._process is None or self._process.pid != os.getpid():
                folder = OwnFolder(Path(self._files.cache_dir))
                cache = BlockCache(folder.path, self._files.cache_bytes, self, self._files.fetch_threads)
                self._process = _Process(os.getpid(), folder, cache)
            return self._process.cache


def _words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _keep(path: Path, lengths: npt.NDArray[Any]) -> None:
    """Write an array whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            np.save(file, lengths)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
