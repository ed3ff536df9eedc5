"""Row counts and row lengths of an Arrow file from its metadata and offsets, without its values.

pyarrow reads a record batch as a whole. Where that would be a download, the few bytes that matter are read
here by their place in the file: see "IPC File Format" and the flatbuffers `File.fbs`, `Message.fbs` of the
Arrow columnar format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")
_CONTINUATION = 0xFFFFFFFF
_RECORD_BATCH = 3
_CODECS = ("lz4", "zstd")


@dataclass(frozen=True)
class _Range:
    """Bytes of a file."""

    start: int
    size: int


@dataclass(frozen=True)
class BatchIndex:
    """Where the parts of a record batch lie."""

    num_rows: int
    buffers: tuple[_Range, ...]
    codec: str | None
    """How each buffer is compressed."""


def read_batches(file: Any) -> list[BatchIndex]:
    """The record batches of an open Arrow file, of which their metadata are read.

    Raises:
        pyarrow.ArrowInvalid: the file is truncated or corrupt.
    """
    try:
        return [_read_batch(file, start, size) for start, size in _blocks(_read_footer(file))]
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"corrupt Arrow metadata: {error}") from error


def read_lengths(
    file: Any, batch: BatchIndex, schema: pa.Schema, column: str
) -> npt.NDArray[np.int64] | None:
    """Length of each list of a column, int64 [num_rows], from its offsets alone; None where the layout does
    not tell.

    Rows that are null count as empty.
    """
    kind = schema.field(column).type
    if pa.types.is_fixed_size_list(kind):
        return np.full(batch.num_rows, kind.list_size, np.int64)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    before = [_num_buffers(field.type) for field in schema][: schema.get_field_index(column)]
    known = [count for count in before if count is not None]
    if len(known) < len(before):
        return None
    if batch.num_rows == 0:
        return np.zeros(0, np.int64)
    raw = _read_buffer(file, batch.buffers[sum(known) + 1], batch.codec)
    offsets = np.frombuffer(raw, np.int64 if pa.types.is_large_list(kind) else np.int32, batch.num_rows + 1)
    return np.diff(offsets).astype(np.int64)


def _num_buffers(kind: pa.DataType) -> int | None:
    """Buffers of a column with its children; None for layouts with a varying number of them."""
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_union(kind) or "view" in str(kind):
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _num_buffers(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return 2
    own = 3 if _has_offsets_and_values(kind) else 1 if _has_validity_only(kind) else 2
    children = [_num_buffers(kind.field(i).type) for i in range(kind.num_fields)]
    known = [count for count in children if count is not None]
    return own + sum(known) if len(known) == len(children) else None


def _has_offsets_and_values(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _has_validity_only(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind))


def _read_buffer(file: Any, where: _Range, codec: str | None) -> bytes | pa.Buffer:
    file.seek(where.start)
    raw = file.read(where.size)
    if codec is None:
        return bytes(raw)
    size = struct.unpack_from("<q", raw)[0]
    return bytes(raw[8:]) if size == -1 else pa.Codec(codec).decompress(raw[8:], size)


class _Table:
    """A table of a flatbuffer: fields by number, absent ones None."""

    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self._at = at
        self._vtable = at - struct.unpack_from("<i", raw, at)[0]

    def _field(self, number: int) -> int | None:
        entry = 4 + 2 * number
        if entry >= struct.unpack_from("<H", self._raw, self._vtable)[0]:
            return None
        offset = struct.unpack_from("<H", self._raw, self._vtable + entry)[0]
        return self._at + offset if offset else None

    def number(self, number: int, form: str, default: int) -> int:
        at = self._field(number)
        return default if at is None else int(struct.unpack_from(form, self._raw, at)[0])

    def table(self, number: int) -> _Table | None:
        at = self._field(number)
        return None if at is None else _Table(self._raw, at + struct.unpack_from("<I", self._raw, at)[0])

    def structs(self, number: int, form: str) -> Iterator[tuple[Any, ...]]:
        at = self._field(number)
        if at is None:
            return
        start = at + struct.unpack_from("<I", self._raw, at)[0]
        for i in range(struct.unpack_from("<I", self._raw, start)[0]):
            yield struct.unpack_from(form, self._raw, start + 4 + i * struct.calcsize(form))


def _root(raw: bytes) -> _Table:
    return _Table(raw, struct.unpack_from("<I", raw)[0])


def _read_footer(file: Any) -> _Table:
    size = file.size()
    file.seek(max(size - _TAIL.size, 0))
    footer_bytes, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != _MAGIC or not 0 < footer_bytes <= size - _TAIL.size:
        raise pa.ArrowInvalid("the file does not end as an Arrow file does")
    file.seek(size - _TAIL.size - footer_bytes)
    return _root(bytes(file.read(footer_bytes)))


def _blocks(footer: _Table) -> list[tuple[int, int]]:
    """Place and size of the metadata of each record batch."""
    return [(offset, size) for offset, size, _ in footer.structs(3, "<qi4xq")]


def _read_batch(file: Any, start: int, size: int) -> BatchIndex:
    file.seek(start)
    raw = bytes(file.read(size))
    skip = 8 if struct.unpack_from("<I", raw)[0] == _CONTINUATION else 4  # before format version 5 without it
    message = _root(raw[skip:])
    batch = message.table(2)
    if message.number(1, "<B", 0) != _RECORD_BATCH or batch is None:
        raise pa.ArrowInvalid(f"the message at byte {start} is no record batch")
    buffers = tuple(_Range(start + size + offset, length) for offset, length in batch.structs(2, "<qq"))
    compression = batch.table(3)
    codec = None if compression is None else _CODECS[compression.number(0, "<b", 0)]
    return BatchIndex(batch.number(0, "<q", 0), buffers, codec)
