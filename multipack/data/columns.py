"""Arrow columns as the compiled reader sees them.

A column is split into raw buffers once, when a data set is opened. Nothing is copied, combined or flattened,
so that memory-mapped data stay on disk and a column may hold any number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from multipack import _core

_ELEMENTS = {
    pa.bool_(): "bit",
    pa.float16(): "float16",
    **{pa.type_for_alias(name): name for name in ("int8", "int16", "int32", "int64", "float32", "float64")},
    **{pa.type_for_alias(name): name for name in ("uint8", "uint16", "uint32", "uint64")},
}


@dataclass(frozen=True)
class NumberColumn:
    """Numbers of each row: a list of them (tokens), or one (a scalar)."""

    reader: _core.Column
    dtype: torch.dtype
    """What tensors of it hold: int64 for integers, float32 for floats of any width, bool for booleans."""


@dataclass(frozen=True)
class Columns:
    """The columns of a data set by what a batch makes of them."""

    tokens: dict[str, NumberColumn] = field(default_factory=dict)
    """One number a token; all have the same row lengths."""
    scalars: dict[str, NumberColumn] = field(default_factory=dict)
    """One number a row."""
    objects: dict[str, pa.ChunkedArray] = field(default_factory=dict)
    """Anything else, such as strings: passed on as Python objects."""


def is_number(data_type: pa.DataType) -> bool:
    return data_type in _ELEMENTS


def is_list(data_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


def is_list_view(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(data_type) or pa.types.is_large_list_view(data_type))


def is_tokens(data_type: pa.DataType) -> bool:
    """A list of numbers; a list of the null type has only empty rows, or nulls."""
    return is_list(data_type) and (is_number(data_type.value_type) or pa.types.is_null(data_type.value_type))


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without extension types, and rows of shape (1, L) as rows of length L."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if is_list(column.type) and is_tokens(column.type.value_type) and _has_one_list_a_row(column):
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
    return column


def _has_one_list_a_row(column: pa.ChunkedArray) -> bool:
    lengths = (_lengths(chunk) for chunk in column.chunks)
    return column.null_count == 0 and all(bool((chunk == 1).all()) for chunk in lengths)


def read_numbers(column: pa.ChunkedArray) -> NumberColumn:
    """One number a row is read as a list of length one."""
    chunks = [_core.Chunk(len(chunk), None, *_values(chunk, 0)) for chunk in column.chunks]
    return _number_column(column.type, 0, 1, chunks)


def read_tokens(column: pa.ChunkedArray) -> NumberColumn:
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        chunks = [
            _core.Chunk(len(chunk), None, *_values(chunk.values, chunk.offset * size))
            for chunk in column.chunks
        ]
        return _number_column(column.type.value_type, 0, size, chunks)
    chunks = [
        _core.Chunk(len(chunk), _offset_bytes(chunk), *_values(chunk.values, 0)) for chunk in column.chunks
    ]
    return _number_column(column.type.value_type, _offset_dtype(column.type).itemsize, 0, chunks)


def _number_column(
    data_type: pa.DataType, offset_bytes: int, row_length: int, chunks: list[_core.Chunk]
) -> NumberColumn:
    # A list of the null type has no values to read: rows that would need them were refused as nulls.
    return number_column(_ELEMENTS.get(data_type, "int64"), offset_bytes, row_length, chunks)


def number_column(
    element: str, offset_bytes: int, row_length: int, chunks: list[_core.Chunk]
) -> NumberColumn:
    """A column of raw chunks; `element` is what they store, named as in numpy."""
    dtype = {"bit": torch.bool, "float": torch.float32}.get(element.rstrip("1234568"), torch.int64)
    return NumberColumn(_core.Column(element, offset_bytes, row_length, chunks), dtype)


def _values(array: pa.Array, skip: int) -> tuple[npt.NDArray[np.uint8] | None, int, int]:
    """Buffer of a number array, first element in it after leaving out `skip`, and how many may be read from
    there."""
    buffer = None if pa.types.is_null(array.type) else array.buffers()[1]
    if buffer is None:
        return None, 0, 0
    first = array.offset + skip
    last = min(array.offset + len(array), buffer.size * 8 // array.type.bit_width)
    return np.frombuffer(buffer, np.uint8), first, max(last - first, 0)


def _offset_dtype(data_type: pa.DataType) -> np.dtype[Any]:
    return np.dtype(np.int64 if pa.types.is_large_list(data_type) else np.int32)


def _offset_bytes(chunk: pa.Array) -> npt.NDArray[Any] | None:
    buffer = chunk.buffers()[1]
    if buffer is None or len(chunk) == 0:
        return None
    return np.frombuffer(buffer, np.uint8)[chunk.offset * _offset_dtype(chunk.type).itemsize :]


def _offsets(chunk: pa.Array) -> npt.NDArray[Any]:
    """Where each row of a list array begins and ends among `chunk.values`."""
    if pa.types.is_fixed_size_list(chunk.type):
        rows: npt.NDArray[Any] = np.arange(chunk.offset, chunk.offset + len(chunk) + 1)
        return rows * int(chunk.type.list_size)
    data = _offset_bytes(chunk)
    dtype = _offset_dtype(chunk.type)
    if data is None:
        return np.zeros(1, dtype)
    offsets: npt.NDArray[Any] = data[: (len(chunk) + 1) * dtype.itemsize].view(dtype)
    return offsets


def _lengths(chunk: pa.Array) -> npt.NDArray[Any]:
    lengths: npt.NDArray[Any] = np.diff(_offsets(chunk))
    return lengths


def null_rows(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Rows that are null or hold a null, ascending."""
    found = [np.zeros(0, np.int64)]
    first_row = 0
    for chunk in column.chunks:
        found.extend(first_row + rows for rows in _null_rows_of_chunk(chunk))
        first_row += len(chunk)
    return np.unique(np.concatenate(found))


def _null_rows_of_chunk(chunk: pa.Array) -> Iterator[npt.NDArray[np.int64]]:
    if chunk.null_count:
        yield np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))
    if not is_list(chunk.type) or len(chunk) == 0:
        return
    if pa.types.is_null(chunk.type.value_type):
        yield np.flatnonzero(_lengths(chunk))
    elif chunk.values.null_count:
        elements = np.flatnonzero(chunk.values.is_null().to_numpy(zero_copy_only=False))
        rows = np.searchsorted(_offsets(chunk), elements, side="right") - 1
        yield rows[(rows >= 0) & (rows < len(chunk))]
