"""Whatever holds token sequences, as an Arrow table: the odd sources, and where each row of them goes."""

from __future__ import annotations

import mmap
import pickle
import sys
import tempfile
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from multipack.data import sources
from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset


def tokens(dataset: TokenDataset) -> list[list[int]]:
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("chunks", [[[3, 1], [0]], [[3], [], [1, 0]], [[]], []])
def test_an_index_map_may_have_any_number_of_chunks(chunks):
    # Concatenating selected data sets joins their index maps without copying them.
    table = datasets.table.InMemoryTable(pa.table({"input_ids": [[1], [2, 2], [3], [4, 4]]}))
    indices = pa.table({"indices": pa.chunked_array(chunks, pa.uint64())})
    source = datasets.Dataset(
        table, indices_table=datasets.table.InMemoryTable(indices), fingerprint="chunked"
    )
    expected = [[4, 4], [2, 2], [1]] if any(chunks) else []
    assert tokens(TokenDataset(source)) == expected == source["input_ids"][:]


def test_selected_data_sets_can_be_joined():
    source = datasets.Dataset.from_dict({"input_ids": [[1], [2, 2], [3]]})
    joined = datasets.concatenate_datasets([source.select([2, 0]), source.select([1])])
    assert tokens(TokenDataset(joined)) == [[3], [1], [2, 2]]


def test_columns_are_chosen_whatever_the_format_shows():
    columns = {"input_ids": [[1, 2]], "labels": [[1, 2]], "name": ["a"]}
    source = datasets.Dataset.from_dict(columns).with_format("torch", columns=["input_ids", "name"])
    assert TokenDataset(source).columns == ("input_ids", "name")
    assert TokenDataset(source, columns=["labels"]).columns == ("input_ids", "labels")


def test_a_list_needs_no_datasets_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "datasets")
    assert tokens(TokenDataset([[1, 2]])) == [[1, 2]]


def test_a_tuple_is_a_pair_or_nothing():
    with pytest.raises(TypeError, match="tuple cannot be read in place"):
        TokenDataset(([1, 2], [0, 2], [0]))


@pytest.mark.parametrize("way", ["array over a mapping", "mapping without a name"])
def test_mappings_that_no_path_leads_to_travel_with_their_values(way):
    with tempfile.TemporaryFile() as file:
        file.write(np.arange(6, dtype=np.int32).tobytes())
        file.flush()
        values: Any
        if way == "array over a mapping":
            values = np.ndarray(6, np.int32, mmap.mmap(file.fileno(), 0))
            assert isinstance(values.base, mmap.mmap)
        else:
            values = np.memmap(file, np.int32, "r")
        dataset = pickle.loads(pickle.dumps(TokenDataset((values, [0, 2, 6]))))
    assert tokens(dataset) == [[0, 1], [2, 3, 4, 5]]


class OldSequence:
    """Rows by index until IndexError, as before `__iter__` was invented."""

    def __getitem__(self, i: int) -> list[int]:
        return [[1], [2, 3]][i]


@pytest.mark.parametrize("rows", [{"a": [1], "b": [2, 3]}.values(), OldSequence(), iter([[1], [2, 3]])])
def test_rows_come_as_the_source_iterates(rows):
    assert tokens(TokenDataset.from_iterable(rows)) == [[1], [2, 3]]


def test_rows_of_other_keys_are_named_in_later_blocks_too(monkeypatch):
    monkeypatch.setattr(sources, "_ROWS_PER_CHUNK", 2)
    rows = [{"input_ids": [i]} for i in range(5)]
    assert tokens(TokenDataset.from_iterable(rows)) == [[i] for i in range(5)]
    rows[3] = {"input_ids": [3], "labels": [3]}
    with pytest.raises(ValueError, match=r"row 3 has the keys \['input_ids', 'labels'\], but row 2 has"):
        TokenDataset.from_iterable(rows)


def test_rows_above_two_to_the_31_numbers_get_wide_offsets(monkeypatch):
    rows = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    assert pa.types.is_list(sources.table_of_rows(rows, "x", first_row=0).column("x").type)
    monkeypatch.setattr(sources, "_MAX_INT32", 2)
    table = sources.table_of_rows(rows, "x", first_row=0)
    assert pa.types.is_large_list(table.column("x").type)
    assert tokens(TokenDataset(table, column="x")) == [[1, 2], [3]]


def test_arrays_are_read_where_they_lie():
    ids, score = np.zeros((2, 3), np.int32), np.zeros(2, np.float32)
    dataset = TokenDataset({"input_ids": ids, "score": score})
    flat = np.zeros(3, np.int64)
    arrow = TokenDataset(
        {"input_ids": pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), pa.array(flat))}
    )
    ids[1, 2], score[1], flat[2] = 7, 0.5, 7
    assert dataset[1]["input_ids"].tolist() == arrow[0]["input_ids"].tolist() == [0, 0, 7]
    assert dataset[1]["score"].item() == 0.5


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[1, 2], [3, 4]], object), [[1, 2], [3, 4]]),
        (np.array([np.array([1]), np.array([2, 3])], object), [[1], [2, 3]]),
        (np.zeros((3, 0), np.int64), []),
        (np.zeros((0, 3), np.int64), []),
    ],
)
def test_arrays_of_objects_and_empty_ones(array, expected):
    assert tokens(TokenDataset({"input_ids": array})) == expected


def test_tensors_of_any_kind():
    rows = [{"input_ids": torch.tensor([1, 2]), "w": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)}] * 2
    rows[1] = rows[1] | {"w": torch.tensor([1.5, 3.0], requires_grad=True)}
    dataset = TokenDataset(rows)
    assert [dataset[i]["w"].tolist() for i in range(2)] == [[0.5, 2.0], [1.5, 3.0]]


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_rows_with_several_lists_are_not_strung_together(make):
    row = make(np.arange(6).reshape(2, 3))
    with pytest.raises(TypeError, match="must be a list of numbers"):
        TokenDataset([{"input_ids": row}])
    beside = TokenDataset([{"input_ids": [1], "table": row}])
    assert beside[0]["table"] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (np.array([1, 2]), np.array([0.5, 1.5]), [[1.0, 2.0], [0.5, 1.5]]),
        (np.array([-1, 2]), np.array([2**63 - 1, 3], np.uint64), [[-1, 2], [2**63 - 1, 3]]),
        (np.array([True, False]), np.array([7, 8], np.uint8), [[1, 0], [7, 8]]),
    ],
)
def test_rows_of_different_types_keep_their_values(first, second, expected):
    empty = {"input_ids": np.array([], np.int64), "x": np.array([], np.uint64)}
    rows = [{"input_ids": np.array([1, 2]), "x": numbers} for numbers in (first, second)]
    dataset = TokenDataset([rows[0], empty, rows[1]])
    assert [dataset[i]["x"].tolist() for i in range(2)] == expected


@pytest.mark.parametrize("beside", [[], [np.array([1, 2])]])
def test_what_64_bits_with_a_sign_cannot_hold_is_refused(beside):
    rows = [*beside, np.array([2**63, 1], np.uint64)]
    with pytest.raises(ValueError, match=r"above 2\^63 - 1"):
        PackedCollator()(TokenDataset(rows).__getitems__(range(len(rows))))


@pytest.mark.parametrize("offsets", [[[0, 2]], [], [0.0, 2.0], np.array([], np.int64)])
def test_offsets_of_another_shape_are_refused(offsets):
    with pytest.raises(ValueError, match="both must be flat, and the offsets integers"):
        TokenDataset((np.arange(2), offsets))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64])
def test_offsets_of_any_width(dtype):
    assert tokens(TokenDataset((np.arange(3), np.array([0, 2, 3], dtype)))) == [[0, 1], [2]]
