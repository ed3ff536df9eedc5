"""Shards cut into blocks: what can be fetched without the rest of its shard.

A block is a row group of Parquet, a record batch of an Arrow file, and the whole of a file that can be read
from its start only (Arrow streams, JSON lines).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc, json, parquet

from multipack.data import arrow_index

Format = Literal["parquet", "arrow", "jsonl"]

SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
}
_ARROW_MAGIC = b"ARROW1"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Shape:
    """What the footer of a shard says."""

    schema: pa.Schema
    block_rows: tuple[int, ...] | None
    """Rows of each block; None: one block, whose rows must be counted."""
    footer: Any = None
    """Of Parquet, so that it is read once."""


def format_of(path: str, given: Format | None) -> Format:
    """The format of a shard, by its name unless it is given.

    Raises:
        ValueError: the name says none.
    """
    if given is not None:
        return given
    for suffix, found in SUFFIXES.items():
        if path.endswith(suffix):
            return found
    raise ValueError(f"{path} has none of the suffixes {', '.join(SUFFIXES)}: say what it is by format=.")


def read_shape(file: Any, path: str, form: Format) -> Shape:
    """Schema and blocks of an open shard. Reads its footer, or all of a JSON file."""
    if form == "parquet":
        metadata = parquet.ParquetFile(file).metadata
        rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return Shape(metadata.schema.to_arrow_schema(), rows, metadata)
    if form == "jsonl":
        return Shape(_read_json(file, path).schema, None)
    if not _is_arrow_file(file):
        return Shape(ipc.open_stream(file).schema, None)  # begins with its schema
    schema = ipc.open_file(file).schema
    return Shape(schema, tuple(batch.num_rows for batch in arrow_index.read_batches(file)))


def read_lengths(file: Any, form: Format, column: str, lengths: str | None) -> NDArray[np.int64] | None:
    """Length of every row of an open shard, int64, without its values: of a column `lengths` that says them,
    else of the offsets of an Arrow file. None where the format does not tell.
    """
    if form == "parquet" and lengths is not None:
        return _numbers(parquet.ParquetFile(file).read([lengths]), lengths)
    if form != "arrow" or not _is_arrow_file(file):
        return None
    schema = ipc.open_file(file).schema
    found = [
        arrow_index.read_lengths(file, batch, schema, column) for batch in arrow_index.read_batches(file)
    ]
    told = [block for block in found if block is not None]
    return np.concatenate([np.zeros(0, np.int64), *told]) if len(told) == len(found) else None


def _numbers(table: pa.Table, name: str) -> NDArray[np.int64]:
    column = table.column(name)
    if column.null_count or not pa.types.is_integer(column.type):
        raise pa.ArrowInvalid(
            f"the column {name!r} of lengths is a {column.type} with {column.null_count} nulls"
        )
    numbers: NDArray[np.int64] = column.to_numpy().astype(np.int64)
    return numbers


def read_block(
    file: Any, path: str, form: Format, block: int, columns: Sequence[str], footer: Any = None
) -> pa.Table:
    """The named columns of a block of an open shard. `footer` is that of its shape."""
    names = list(columns)
    if form == "parquet":
        return (
            parquet.ParquetFile(file, metadata=footer, pre_buffer=True)
            .read_row_group(block, names)
            .select(names)
        )
    if form == "jsonl":
        return _read_json(file, path).select(names)
    if not _is_arrow_file(file):
        return _parse(file, lambda raw: ipc.open_stream(raw).read_all()).select(names)
    fields = sorted(ipc.open_file(file).schema.get_field_index(name) for name in names)
    file.seek(0)
    reader = ipc.open_file(file, options=ipc.IpcReadOptions(included_fields=fields))
    return pa.Table.from_batches([reader.get_batch(block)]).select(names)


def _is_arrow_file(file: Any) -> bool:
    magic = file.read(len(_ARROW_MAGIC))
    file.seek(0)
    return bool(magic == _ARROW_MAGIC)


def _read_json(file: Any, path: str) -> pa.Table:
    compression = next((name for suffix, name in _COMPRESSIONS.items() if path.endswith(suffix)), None)
    return _parse(
        file,
        lambda raw: json.read_json(
            raw if compression is None else pa.CompressedInputStream(raw, compression)
        ),
    )


def _parse(file: Any, parse: Callable[[Any], pa.Table]) -> pa.Table:
    """A file that is read as a whole. Once its bytes are here, an error is one of the content and not of the
    connection."""
    raw = pa.BufferReader(file.read_buffer())
    try:
        return parse(raw)
    except OSError as error:
        raise pa.ArrowInvalid(str(error)) from error
