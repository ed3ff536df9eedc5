"""Columns and row lengths of an Arrow table, checked: whatever is wrong with the data is found here, before
the first batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from multipack.data.columns import (
    Columns,
    is_list_view,
    is_number,
    is_tokens,
    null_rows,
    plain,
    read_numbers,
    read_tokens,
)
from multipack.data.reading import check_equal_lengths, lengths_of
from multipack.data.sources import Source

_ROWS_AT_ONCE = 1 << 20


def read_columns(source: Source, column: str) -> Columns:
    """The columns of a table, of which `column` holds the tokens. Raises as TokenDataset."""
    columns = Columns()
    for name in source.table.column_names:
        values = plain(source.table.column(name))
        if name == column and pa.types.is_null(values.type):
            values = pa.chunked_array([pa.nulls(len(values), pa.list_(pa.null()))])
        key = "input_ids" if name == column else name
        if is_list_view(values.type):
            raise TypeError(
                f"column {name!r} is a {values.type}, whose rows may share values. Make it a list: "
                "pa.LargeListArray.from_arrays(offsets summed from list_value_length, array.flatten())."
            )
        if is_tokens(values.type):
            _refuse_nulls(name, null_rows(values), source)
            columns.tokens[key] = read_tokens(values)
        elif name == column:
            raise TypeError(
                f"column {name!r} is a {values.type}; it must be a list of numbers, one a token, in each row"
            )
        elif is_number(values.type):
            _refuse_nulls(name, null_rows(values), source)
            columns.scalars[key] = read_numbers(values)
        else:
            columns.objects[key] = values
    if column != "input_ids" and "input_ids" in source.table.column_names:
        raise ValueError(
            f"{column!r} becomes 'input_ids', but there is another column of this name: leave it out by "
            "`columns`"
        )
    return columns


def _refuse_nulls(name: str, nulls: npt.NDArray[np.int64], source: Source) -> None:
    if source.index_map is not None and len(nulls):
        nulls = np.flatnonzero(np.isin(source.index_map, nulls))
    if len(nulls):
        raise ValueError(
            f"row {nulls[0]} of column {name!r} is null or holds a null ({len(nulls)} such rows): it has no "
            "token or number to train on. Filter these rows out or fill them."
        )


def row_lengths(columns: Columns, source: Source) -> npt.NDArray[Any]:
    """Length of every row of the source, after checking that all token columns agree. Reads offsets, no
    values."""
    if source.rows is not None:
        lengths = source.rows.lengths
        return lengths if source.index_map is None else lengths[source.index_map]
    lengths = np.empty(source.num_rows, np.uint16)
    for first in range(0, source.num_rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, source.num_rows)
        rows = np.arange(first, last) if source.index_map is None else source.index_map[first:last]
        block = lengths_of(columns.tokens["input_ids"], rows)
        for name, column in columns.tokens.items():
            if name != "input_ids":
                check_equal_lengths(name, block, lengths_of(column, rows), first)
        lengths = widen(lengths, int(block.max()))
        lengths[first:last] = block
    return lengths


def widen(lengths: npt.NDArray[Any], longest: int) -> npt.NDArray[Any]:
    """The lengths in a dtype that holds `longest`, and is no narrower than theirs."""
    for dtype in (np.uint16, np.uint32):
        if longest <= np.iinfo(dtype).max:
            return lengths.astype(np.promote_types(lengths.dtype, dtype), copy=False)
    return lengths.astype(np.int64, copy=False)
