"""Lengths of Arrow files from their offsets, against pyarrow, and how many bytes that takes."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc

from multipack.data.arrow_index import read_batches, read_lengths

# Columns of every kind of layout that may stand before the tokens.
BEFORE = {
    "none": pa.null(),
    "flag": pa.bool_(),
    "text": pa.string(),
    "blob": pa.large_binary(),
    "pair": pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]),
    "fixed": pa.list_(pa.float32(), 2),
    "word": pa.dictionary(pa.int8(), pa.string()),
    "map": pa.map_(pa.string(), pa.int32()),
    "bytes4": pa.binary(4),
}


class Counted(io.BytesIO):
    """Counts what is read."""

    num_read = 0

    def read(self, size=-1):
        raw = super().read(size)
        self.num_read += len(raw)
        return raw

    def size(self):
        return len(self.getbuffer())


def write(table, max_chunksize=None, **options):
    sink = io.BytesIO()
    with ipc.new_file(sink, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize)
    return Counted(sink.getvalue())


def lengths_of(file, schema, column="input_ids"):
    found = [read_lengths(file, batch, schema, column) for batch in read_batches(file)]
    return [lengths.tolist() for lengths in found]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64())])
@given(lengths=st.lists(st.integers(0, 9), max_size=30), batch=st.integers(1, 8))
def test_lengths_are_those_of_pyarrow(lengths, batch, kind, compression):
    rows = pa.array([[1] * length for length in lengths], kind)
    others = {name: pa.nulls(len(lengths), kind) for name, kind in BEFORE.items() if name != "word"}
    table = pa.table({**others, "input_ids": rows, "after": pa.array(lengths, pa.int32())})
    file = write(table, batch, compression=compression)
    expected = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    assert lengths_of(file, table.schema) == expected
    assert [index.num_rows for index in read_batches(file)] == [len(part) for part in expected]


def test_values_before_the_tokens_do_not_shift_the_buffers():
    table = pa.table(
        {
            "flag": [True, False],
            "text": ["a", "bc"],
            "pair": pa.array([{"a": 1, "b": ["x"]}, {"a": 2, "b": []}], BEFORE["pair"]),
            "fixed": pa.array([[1, 2], [3, 4]], BEFORE["fixed"]),
            "word": pa.array(["u", "v"]).dictionary_encode(),
            "map": pa.array([[("k", 1)], []], BEFORE["map"]),
            "input_ids": [[1, 2, 3], [4]],
        }
    )
    assert lengths_of(write(table), table.schema) == [[3, 1]]


def test_a_sliced_table_and_fixed_lists():
    table = pa.table(
        {"input_ids": [[1], [2, 3], [4, 5, 6]], "f": pa.array([[1, 2]] * 3, pa.list_(pa.int8(), 2))}
    )
    file = write(table.slice(1))
    assert lengths_of(file, table.schema) == [[2, 3]]
    assert lengths_of(file, table.schema, "f") == [[2, 2]]


def test_values_are_not_read():
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, 1000)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, pa.array(rng.integers(0, 50000, offsets[-1]).astype(np.int32)))
    table = pa.table({"input_ids": column})
    file = write(table, 100)
    assert np.concatenate(lengths_of(file, table.schema)).tolist() == lengths.tolist()
    assert file.num_read < 20_000  # 4 bytes a row, 10 batches of metadata and the footer; the file has 4 MB
    assert file.size() > 3_500_000


def test_layouts_that_do_not_tell():
    table = pa.table({"view": pa.array(["a"], pa.string_view()), "input_ids": [[1]], "scalar": [1]})
    file = write(table)
    batch = read_batches(file)[0]
    assert read_lengths(file, batch, table.schema, "input_ids") is None
    assert read_lengths(file, batch, table.schema, "scalar") is None


@pytest.mark.parametrize("cut", [5, 30, 200])
def test_truncated_files_are_refused(cut):
    raw = write(pa.table({"input_ids": [[1, 2]]})).getvalue()
    with pytest.raises(pa.ArrowInvalid):
        read_batches(Counted(raw[:-cut]))
    with pytest.raises(pa.ArrowInvalid):
        read_batches(Counted(raw[:3]))
