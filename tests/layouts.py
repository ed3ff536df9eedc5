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
    """Values over the whole range of the type, its ends included; uint64 up to 2^63 - 1, which int64 holds."""
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
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    chunks = [draw(_chunk_of(rows[a:b], kind, rows)) for a, b in pairwise(bounds)]
    return pa.chunked_array(chunks)


@st.composite
def _chunk_of(draw: st.DrawFn, rows: list[np.ndarray], kind: str, all_rows: list[np.ndarray]) -> pa.Array:
    # Rows before and after the chunk that a slice hides, and values before the first that another slice hides.
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
