"""The same rows in different Arrow memory: hypothesis strategies for list columns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
ELEMENTS = (*INTEGERS, *FLOATS, "bool")


def random_values(element: str, count: int, seed: int) -> np.ndarray:
    """Values over the whole range of the type, its ends included; uint64 up to 2^63 - 1, which int64
    holds."""
    rng = np.random.default_rng(seed)
    if element == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if element in FLOATS:
        values = rng.standard_normal(count).astype(element)
        values[rng.random(count) < 0.1] = 0
        return values
    limits = np.iinfo(element)
    top = min(int(limits.max), 2**63 - 1)
    values = rng.integers(limits.min, top, count, dtype=element, endpoint=True)
    values[rng.random(count) < 0.1] = top
    values[rng.random(count) < 0.1] = limits.min
    return values


@st.composite
def rows_of(draw: st.DrawFn, element: str, lengths: list[int]) -> list[np.ndarray]:
    seed = draw(st.integers(0, 2**32 - 1))
    values = random_values(element, sum(lengths), seed)
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []


@st.composite
def column_of(draw: st.DrawFn, rows: list[np.ndarray]) -> pa.ChunkedArray:
    """The rows as a chunked list column with random chunks, offset widths, slices and unused values."""
    equal = len({len(row) for row in rows}) == 1
    kind = draw(st.sampled_from(["list", "large_list", *(["fixed_size_list"] if equal else [])]))
    chunks = [draw(_chunk_of(part, kind, rows)) for part in draw(_parts(rows))]
    return pa.chunked_array(chunks)


@st.composite
def _parts(draw: st.DrawFn, rows: list[Any]) -> list[list[Any]]:
    """The rows cut into chunks, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    return [rows[a:b] for a, b in pairwise([0, *cuts, len(rows)])]


@st.composite
def _chunk_of(draw: st.DrawFn, rows: list[np.ndarray], kind: str, all_rows: list[np.ndarray]) -> pa.Array:
    if not rows and kind != "fixed_size_list" and draw(st.booleans()):  # an empty array need not have offsets
        data_type = {"list": pa.list_, "large_list": pa.large_list}[kind](
            pa.from_numpy_dtype(all_rows[0].dtype)
        )
        return pa.Array.from_buffers(data_type, 0, [None, None], children=[pa.nulls(0, data_type.value_type)])
    # Rows before and after the chunk that a slice hides, and values before the first that another slice
    # hides.
    before = draw(st.integers(0, min(2, len(all_rows))))
    after = draw(st.integers(0, min(2, len(all_rows))))
    stored = [*all_rows[:before], *rows, *all_rows[:after]]
    hidden = draw(st.integers(0, 9))
    dtype = all_rows[0].dtype
    values = pa.array(np.concatenate([np.ones(hidden, dtype), *stored, np.ones(3, dtype)])).slice(hidden)
    if kind == "fixed_size_list":
        size = len(all_rows[0])
        if size == 0:
            return pa.array([[] for _ in rows], pa.list_(values.type, 0))
        array: Any = pa.FixedSizeListArray.from_arrays(values[: size * len(stored)], size)
    else:
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in stored])])
        skipped = draw(st.integers(0, 1))
        if skipped:  # offsets that do not begin at 0
            values = pa.concat_arrays([values[:1], values])
            offsets = offsets + 1
        if kind == "list":
            array = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)
        else:
            array = pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), values)
    return array.slice(before, len(rows))


class Wrapped(pa.ExtensionType):  # type: ignore[misc]
    """An extension type that says nothing about its storage."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "multipack.tests.wrapped")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Wrapped:
        return cls(storage)


@st.composite
def disguised(draw: st.DrawFn, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as it is, as an extension type, or with rows of shape (1, length)."""
    way = draw(st.sampled_from(["plain", "extension", "one list a row"]))
    if way == "extension":
        wrapped = Wrapped(column.type)
        chunks = [pa.ExtensionArray.from_storage(wrapped, chunk) for chunk in column.chunks]
        return pa.chunked_array(chunks, wrapped)
    if way == "one list a row":
        return pa.chunked_array([_one_list_a_row(chunk) for chunk in column.chunks])
    return column


def _one_list_a_row(chunk: pa.Array) -> pa.Array:
    """Each row in a list of its own, as a slice that hides an empty list before and one after them."""
    offsets = [0, *range(len(chunk) + 1), len(chunk)]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), chunk).slice(1, len(chunk))


@st.composite
def column_with_nulls(draw: st.DrawFn, length: int | None) -> tuple[pa.ChunkedArray, list[Any]]:
    """A list column in which rows, or numbers in them, may be null, and its rows.

    Rows that a slice hides may be null or hold nulls too. All rows have `length` numbers; None: any number.
    """
    numbers = st.none() | st.integers(0, 9)
    row = (
        st.lists(numbers, max_size=4)
        if length is None
        else st.lists(numbers, min_size=length, max_size=length)
    )
    clean = row.map(lambda numbers: [number or 0 for number in numbers])
    rows = draw(st.lists(st.none() | row | clean | clean, min_size=1, max_size=9))
    makers = [pa.list_, pa.large_list]
    data_type = draw(st.sampled_from(makers))(pa.int16()) if length is None else pa.list_(pa.int16(), length)
    chunks = []
    for part in draw(_parts(rows)):
        before, after = (
            draw(st.lists(st.none() | row, max_size=2)),
            draw(st.lists(st.none() | row, max_size=2)),
        )
        chunks.append(pa.array([*before, *part, *after], data_type).slice(len(before), len(part)))
    return pa.chunked_array(chunks), rows
