"""What must hold however Arrow lays out the rows: types, chunks, slices, offsets, index maps, extension
types, nulls."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import INTEGERS, column_of, column_with_nulls, disguised
from oracles import packed_batch

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.order.batch import BatchIndices

Rows = list[dict[str, list[int]]]

KINDS = {
    "input_ids": (0, 100, INTEGERS),
    "labels": (-100, 20, ("int8", "int32", "int64")),
    "loss_mask": (0, 1, ("bool", "uint8", "float32")),
    "extra": (-5, 5, ("int16", "int64")),
}
"""Of each column the least and largest number, and the types it may have."""


@st.composite
def token_rows(draw: st.DrawFn) -> Rows:
    """Rows of a few tokens, some empty, with some further columns."""
    any_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=8)
    lengths = draw(any_lengths | st.lists(st.just(3), min_size=1, max_size=8))
    names = ["input_ids", "extra", *draw(st.sets(st.sampled_from(["labels", "loss_mask"])))]
    row_of = {name: st.integers(low, high) for name, (low, high, _) in KINDS.items()}
    return [{name: draw(st.lists(row_of[name], min_size=n, max_size=n)) for name in names} for n in lengths]


@st.composite
def tables_of(draw: st.DrawFn, rows: Rows) -> pa.Table:
    """The rows, each column in a layout of its own."""
    columns = {}
    for name in rows[0]:
        element = draw(st.sampled_from(KINDS[name][2]))
        column = draw(column_of([np.array(row[name], element) for row in rows]))
        columns[name] = draw(disguised(column))
    return pa.table(columns)


def has_extension(table: pa.Table) -> bool:
    return any(isinstance(column_type, pa.BaseExtensionType) for column_type in table.schema.types)


def selected(table: pa.Table, index_map: list[int]) -> datasets.Dataset:
    """A `datasets.Dataset` of these rows of the table, its index map in two chunks."""
    half = len(index_map) // 2
    indices = pa.table({"indices": pa.chunked_array([index_map[:half], index_map[half:]], pa.uint64())})
    return datasets.Dataset(
        datasets.table.InMemoryTable(table),
        indices_table=datasets.table.InMemoryTable(indices),
        fingerprint="rows",
    )


def usable(rows: Rows, max_length: int, overlong: str) -> list[tuple[int, int, dict[str, list[int]]]]:
    """Row, first token and content of each sequence."""
    sequences = []
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        if overlong == "drop" and length > max_length:
            continue
        stop = length if overlong == "split" else min(length, max_length)
        for start in range(0, stop, max_length):
            part = {name: numbers[start : start + max_length] for name, numbers in row.items()}
            sequences.append((i, start, part))
    return sequences


@given(
    data=st.data(),
    rows=token_rows(),
    max_length=st.integers(1, 9),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
    pickled=st.booleans(),
)
def test_a_batch_is_that_of_plain_lists(
    data: st.DataObject, rows: Rows, max_length: int, overlong: Any, pickled: bool
) -> None:
    source: Any = data.draw(tables_of(rows))
    if not has_extension(source) and data.draw(st.booleans()):
        index_map = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
        source, rows = selected(source, index_map), [rows[i] for i in index_map]
    dataset = TokenDataset(source, max_length=max_length, overlong=overlong)
    if pickled:
        dataset = pickle.loads(pickle.dumps(dataset))
    sequences = usable(rows, max_length, overlong)
    assert list(zip(dataset.rows.tolist(), dataset.starts.tolist(), strict=True)) == [
        (row, start) for row, start, _ in sequences
    ]
    assert dataset.lengths.tolist() == [len(part["input_ids"]) for *_, part in sequences]
    assert dataset.report.empty_sequences == sum(not row["input_ids"] for row in rows)
    lost = sum(len(row["input_ids"]) for row in rows) - sum(dataset.lengths.tolist())
    assert dataset.report.lost_tokens == lost
    if not sequences:
        return

    order = data.draw(st.permutations(range(len(sequences))))
    cuts = sorted(
        data.draw(st.sets(st.integers(1, len(order) - 1), max_size=3) if order[1:] else st.just({}))
    )
    bins = [order[a:b] for a, b in pairwise([0, *cuts, len(order)])]
    capacity = max(sum(int(dataset.lengths[i]) for i in content) for content in bins)
    in_rows = data.draw(st.booleans())
    collator = PackedCollator(layout="rows" if in_rows else "flat", capacity=capacity, return_indices=True)
    batch = collator(dataset.__getitems__(BatchIndices.of_bins(bins)))
    parts = [[sequences[i][2] for i in content] for content in bins]
    if in_rows:
        expected = packed_batch(parts, slots_of_bin=capacity)
    else:
        expected = packed_batch([[part for content in parts for part in content]])
    for name in ("input_ids", "labels", "extra", "position_ids", "seq_idx"):
        assert batch[name].flatten().tolist() == expected[name], name
    assert batch["cu_seq_lens_q"].tolist() == expected["boundaries"]
    assert batch["num_target_tokens"] == expected["num_target_tokens"]
    assert batch["indices"].tolist() == [sequences[i][0] for i in order]


@given(data=st.data(), length=st.none() | st.integers(0, 3))
def test_the_first_row_with_a_null_is_named(data: st.DataObject, length: int | None) -> None:
    column, rows = data.draw(column_with_nulls(length))
    source: Any = pa.table({"input_ids": data.draw(disguised(column))})
    if not has_extension(source) and data.draw(st.booleans()):
        index_map = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=9))
        source, rows = selected(source, index_map), [rows[i] for i in index_map]
    nulls = [i for i, row in enumerate(rows) if row is None or None in row]
    if nulls:
        told = rf"^row {nulls[0]} of column 'input_ids' is null or holds a null \({len(nulls)} such rows\)"
        with pytest.raises(ValueError, match=told):
            TokenDataset(source)
    else:
        dataset = TokenDataset(source)
        found = [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]
        assert found == [row for row in rows if row]


def test_a_null_that_covers_a_row_is_not_skipped() -> None:
    # Row 1 of shape (1, L) is null, though a list lies where it would be: flattened, row 2 would slip into
    # its place.
    inner = pa.array([[1, 2], [3], [4]])
    offsets = pa.py_buffer(np.arange(4, dtype=np.int32))
    column = pa.Array.from_buffers(
        pa.list_(inner.type), 3, [pa.py_buffer(bytes([0b101])), offsets], children=[inner]
    )
    assert column.to_pylist() == [[[1, 2]], None, [[4]]]
    with pytest.raises((TypeError, ValueError), match="column 'input_ids'"):
        TokenDataset(pa.table({"input_ids": column}))
