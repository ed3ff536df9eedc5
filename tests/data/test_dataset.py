"""TokenDataset: every kind of source, over-long and broken rows, size limits, pickling."""

from __future__ import annotations

import logging
import pickle
import threading
import time
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import ELEMENTS, column_of, rows_of

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset

ROWS = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "weight": 0.5, "source": "web"},
    {"input_ids": [4], "labels": [4], "weight": 1.0, "source": "books"},
    {"input_ids": [5, 6], "labels": [-100, 6], "weight": 2.0, "source": "code"},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


class MapStyle(torch.utils.data.Dataset):
    """As many are: no IndexError at the end."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index % len(ROWS)]


def tensors(row: dict) -> dict:
    return {name: value if isinstance(value, str) else torch.tensor(value) for name, value in row.items()}


def on_disk(tmp_path, rows=COLUMNS):
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "data")
    return datasets.load_from_disk(tmp_path / "data")


def values(dataset: TokenDataset) -> list[dict]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}
        for row in (dataset[i] for i in range(len(dataset)))
    ]


def tokens(dataset: TokenDataset) -> list[list[int]]:
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


# Sources.


@pytest.mark.parametrize(
    "source",
    [
        datasets.Dataset.from_dict(COLUMNS),
        pa.table(COLUMNS),
        pa.RecordBatch.from_pydict(COLUMNS),
        pa.concat_tables([pa.table(COLUMNS).slice(0, 1), pa.table(COLUMNS).slice(1)]),
        COLUMNS,
        ROWS,
        [tensors(row) for row in ROWS],
        {name: [tensors(row)[name] for row in ROWS] for name in COLUMNS},
        {**COLUMNS, "input_ids": [np.array(ids, np.uint16) for ids in COLUMNS["input_ids"]]},
    ],
    ids=[
        "datasets",
        "table",
        "record batch",
        "chunks",
        "dict",
        "rows",
        "rows of tensors",
        "dict of tensors",
        "arrays",
    ],
)
def test_every_source_gives_the_same_sequences(source):
    dataset = TokenDataset(source)
    assert dataset.columns == ("input_ids", "labels", "weight", "source")
    assert dataset.lengths.tolist() == [3, 1, 2]
    assert dataset.lengths.dtype == np.uint16
    assert values(dataset) == ROWS
    row = dataset[0]
    assert (row["input_ids"].dtype, row["labels"].dtype, row["weight"].dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )
    assert values(pickle.loads(pickle.dumps(dataset))) == ROWS


@pytest.mark.parametrize(
    "rows", [iter(ROWS), MapStyle(), datasets.Dataset.from_list(ROWS).to_iterable_dataset()]
)
def test_from_iterable_copies_any_rows(rows):
    assert values(TokenDataset.from_iterable(rows)) == ROWS


def test_a_saved_dataset_is_read_in_place(tmp_path):
    allocated = pa.total_allocated_bytes()
    dataset = TokenDataset(on_disk(tmp_path))
    assert values(dataset) == ROWS
    assert pa.total_allocated_bytes() == allocated


def test_flat_values_and_offsets_are_a_source():
    stream = np.arange(10, 20, dtype=np.uint16)
    for offsets in (np.array([0, 3, 4, 10]), np.array([0, 3, 4, 10], np.int32), torch.tensor([0, 3, 4, 10])):
        assert tokens(TokenDataset((stream, offsets))) == [[10, 11, 12], [13], [14, 15, 16, 17, 18, 19]]


def test_two_dimensional_arrays_are_rows_of_one_length():
    dataset = TokenDataset({"input_ids": np.arange(6).reshape(3, 2), "labels": torch.arange(6).reshape(3, 2)})
    assert values(dataset) == [
        {"input_ids": [2 * i, 2 * i + 1], "labels": [2 * i, 2 * i + 1]} for i in range(3)
    ]


def test_rows_may_be_bare_token_sequences():
    assert tokens(TokenDataset([[1, 2], [3]])) == [[1, 2], [3]]
    assert tokens(TokenDataset.from_iterable(torch.tensor(row) for row in ([1, 2], [3]))) == [[1, 2], [3]]


def test_the_token_column_may_have_another_name():
    dataset = TokenDataset({"tokens": [[7, 8]], "text": ["a"]}, column="tokens")
    assert values(dataset) == [{"input_ids": [7, 8], "text": "a"}]
    assert values(pickle.loads(pickle.dumps(dataset))) == values(dataset)
    with pytest.raises(ValueError, match="another column of this name"):
        TokenDataset({"tokens": [[7]], "input_ids": [[7]]}, column="tokens")


def test_columns_chooses_what_is_read(tmp_path):
    assert TokenDataset(ROWS, columns=["weight"]).columns == ("input_ids", "weight")
    formatted = on_disk(tmp_path).with_format("torch", columns=["input_ids", "labels"])
    assert TokenDataset(formatted).columns == ("input_ids", "labels")
    with pytest.raises(ValueError, match=r"0 columns named 'reward'; it has \['input_ids'"):
        TokenDataset(ROWS, columns=["reward"])


@pytest.mark.report("pytorch/pytorch#58734")
def test_mixed_integer_types_keep_their_values():
    # torch.cat refuses uint16 with int64, and int16 would make 65535 negative.
    dataset = TokenDataset(
        [{"input_ids": np.array([65535], np.uint16)}, {"input_ids": torch.tensor([70000])}]
    )
    assert tokens(dataset) == [[65535], [70000]]


@pytest.mark.parametrize("kind", ["list", "array", "tensor", "arrow"])
@pytest.mark.report("huggingface/transformers#43363")
def test_rows_of_shape_one_by_length_count_as_their_length(kind):
    # Tokenizers return them with return_tensors.
    rows = [[[1, 2, 3, 4]], [[5, 6]]]
    source = {
        "list": {"input_ids": rows, "attention_mask": [[[1] * 4], [[1] * 2]]},
        "array": [{"input_ids": np.array(row), "attention_mask": np.ones((1, len(row[0])))} for row in rows],
        "tensor": [{"input_ids": torch.tensor(row)} for row in rows],
        "arrow": pa.table({"input_ids": rows, "attention_mask": [[[1] * 4], [[1] * 2]]}),
    }[kind]
    dataset = TokenDataset(source)
    assert dataset.lengths.tolist() == [4, 2]
    assert tokens(dataset) == [[1, 2, 3, 4], [5, 6]]


def test_deeper_rows_are_refused_for_tokens_and_passed_on_otherwise():
    with pytest.raises(TypeError, match=r"'input_ids' is a list<.*must be a list of numbers"):
        TokenDataset({"input_ids": [[[1], [2]]]})
    messages = [[{"role": "user", "content": "hi"}]]
    assert values(TokenDataset({"input_ids": [[1]], "messages": messages, "tools": [None]}))[0] == {
        "input_ids": [1],
        "messages": messages[0],
        "tools": None,
    }


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}), TypeError, "take one split"),
        (MapStyle(), TypeError, "TokenDataset.from_iterable"),
        (iter(ROWS), TypeError, "TokenDataset.from_iterable"),
        (
            datasets.Dataset.from_dict(COLUMNS).with_transform(lambda batch: batch),
            TypeError,
            "with_transform",
        ),
        ({"text": ["a"]}, ValueError, r"0 columns named 'input_ids'; it has \['text'\]"),
        ({"input_ids": ["a"]}, TypeError, "'input_ids' is a string"),
        ({"input_ids": [[1], [2]], "weight": [1.0]}, ValueError, "differ in their number of rows"),
        ([{"input_ids": [1]}, {"input_ids": [1], "extra": 1}], ValueError, "row 1 has the keys"),
        ([{"input_ids": [1]}, {"input_ids": ["a"]}], ValueError, "'input_ids' cannot become Arrow"),
        ([np.array([2**64 - 1], np.uint64), np.array([1])], ValueError, "does not fit int64"),
        ((np.zeros((2, 2)), np.array([0, 1])), ValueError, "must be flat"),
        ((np.zeros(2), np.array([0.0, 1.0])), ValueError, "the offsets integers"),
    ],
)
def test_sources_that_cannot_be_read_say_what_to_do(source, error, message):
    with pytest.raises(error, match=message):
        TokenDataset(source)


def test_an_exhausted_iterable_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        TokenDataset.from_iterable(iter([]))


# datasets.Dataset with an index map.


@pytest.mark.report("huggingface/datasets#3459")
def test_selected_and_shuffled_rows_follow_the_index_map(tmp_path):
    # Lengths [3, 5, 2, 7], select([3, 0]) is [7, 3]; raw table access would give the first two.
    source = on_disk(tmp_path, {"input_ids": [[i] * length for i, length in enumerate([3, 5, 2, 7])]})
    assert TokenDataset(source.select([3, 0])).lengths.tolist() == [7, 3]
    assert tokens(TokenDataset(source.select([3, 0]))) == [[3] * 7, [0] * 3]
    shuffled = source.shuffle(seed=0)
    assert tokens(TokenDataset(shuffled)) == list(shuffled["input_ids"])
    kept = shuffled.filter(lambda row: len(row["input_ids"]) > 2)
    dataset = TokenDataset(kept)
    assert tokens(dataset) == list(kept["input_ids"])
    assert tokens(pickle.loads(pickle.dumps(dataset))) == list(kept["input_ids"])
    assert TokenDataset(source.select([])).lengths.tolist() == []


def test_the_index_map_combines_with_dropped_rows(tmp_path):
    source = on_disk(tmp_path, {"input_ids": [[1], [], [2, 2, 2], [3, 3]]}).select([3, 2, 1, 0])
    dataset = TokenDataset(source, max_length=2, overlong="drop")
    assert tokens(dataset) == [[3, 3], [1]]
    assert dataset.rows.tolist() == [0, 3]  # rows of the selection, not of the table
    assert tokens(pickle.loads(pickle.dumps(dataset))) == [[3, 3], [1]]


def test_nulls_outside_the_selection_do_not_matter():
    source = datasets.Dataset.from_dict({"input_ids": [[1], None, [3]]})
    assert tokens(TokenDataset(source.select([2, 0]))) == [[3], [1]]
    with pytest.raises(ValueError, match="row 1 of column 'input_ids' is null"):
        TokenDataset(source.select([2, 1, 0]))


@pytest.mark.report("huggingface/datasets#5541")
def test_five_million_shuffled_rows_open_in_a_second_and_80_megabytes():
    # Flattening the index map would make a chunk a row.
    num_rows = 5_000_000
    lengths = np.random.default_rng(0).integers(1, 4, num_rows)
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.uint8)))
    order = np.random.default_rng(1).permutation(num_rows)
    source = datasets.Dataset(
        datasets.table.InMemoryTable(pa.table({"input_ids": column})),
        indices_table=datasets.table.InMemoryTable(pa.table({"indices": pa.array(order, pa.uint64())})),
        fingerprint="x",
    )
    arrow_bytes = pa.total_allocated_bytes()
    tracemalloc.start()
    start = time.process_time()
    dataset = TokenDataset(source)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(dataset.lengths, lengths[order])
    assert seconds < 1
    assert peak < 80e6
    assert pa.total_allocated_bytes() == arrow_bytes


# Arrow layouts.


@given(st.data())
def test_random_layouts_of_several_columns(data):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    names = ["input_ids", "labels", "loss_mask"]
    rows = {name: data.draw(rows_of(data.draw(st.sampled_from(ELEMENTS)), lengths)) for name in names}
    dataset = TokenDataset(pa.table({name: data.draw(column_of(rows[name])) for name in names}))
    usable = [i for i, length in enumerate(lengths) if length]
    assert dataset.rows.tolist() == usable
    assert dataset.report.empty_sequences == len(lengths) - len(usable)
    for row, i in zip(values(dataset), usable, strict=True):
        for name in names:
            expected = rows[name][i]
            dtype = np.float32 if expected.dtype.kind == "f" else expected.dtype
            assert row[name] == expected.astype(dtype).tolist()


@pytest.mark.report("apache/arrow#37733")
@pytest.mark.report("apache/arrow#41672")
def test_slices_count():
    # `.values` of a sliced list ignores the slice.
    table = pa.table({"input_ids": [[1], [1, 2], [1, 2, 3]]}).slice(1)
    assert tokens(TokenDataset(table)) == [[1, 2], [1, 2, 3]]
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)).slice(1)
    assert tokens(TokenDataset(pa.table({"input_ids": fixed}))) == [[3, 4], [5, 6]]


@pytest.mark.report("apache/arrow#39813")
@pytest.mark.parametrize("views", [pa.ListViewArray, pa.LargeListViewArray])
def test_list_views_are_refused_with_a_remedy_that_works(views):
    # Rows of a list view may share values.
    column = views.from_arrays([0, 1, 2], [2, 2, 2], [1, 2, 3, 4])
    with pytest.raises(TypeError, match=r"list_view.*pa\.LargeListArray\.from_arrays"):
        TokenDataset(pa.table({"input_ids": column}))
    offsets = np.concatenate([[0], np.cumsum(column.value_lengths())])
    remedied = pa.LargeListArray.from_arrays(offsets, column.flatten())
    assert tokens(TokenDataset(pa.table({"input_ids": remedied}))) == [[1, 2], [2, 3], [3, 4]]


def test_extension_types_are_read_by_their_storage():
    column = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    )
    assert tokens(TokenDataset(pa.table({"input_ids": column}))) == [[1, 2], [3, 4]]


def test_more_than_2_to_the_31_elements_in_a_column():
    # huggingface/datasets 615. Two chunks of two rows of 10^9 bits, of one lazily mapped buffer of zeros.
    values = pa.Array.from_buffers(
        pa.bool_(), 2 * 10**9, [None, pa.py_buffer(np.zeros(250_000_000, np.uint8))]
    )
    chunk = pa.ListArray.from_arrays(pa.array([0, 10**9, 2 * 10**9], pa.int32()), values)
    table = pa.table({"input_ids": pa.chunked_array([chunk, chunk])})
    dataset = TokenDataset(table)
    assert dataset.lengths.tolist() == [10**9] * 4
    assert dataset.lengths.dtype == np.uint32
    assert dataset.report.num_tokens == 4 * 10**9
    split = TokenDataset(table, max_length=999_999_990, overlong="split")
    assert split.starts.tolist() == [0, 999_999_990] * 4
    assert split[7]["input_ids"].tolist() == [False] * 10


def test_lengths_above_32_bits():
    values = pa.Array.from_buffers(pa.bool_(), 2**33, [None, pa.py_buffer(np.zeros(2**30, np.uint8))])
    column = pa.LargeListArray.from_arrays(pa.array([0, 2**33], pa.int64()), values)
    dataset = TokenDataset(pa.table({"input_ids": column}))
    assert dataset.lengths.tolist() == [2**33]
    assert dataset.lengths.dtype == np.int64


@pytest.mark.parametrize(("longest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_lengths_take_the_smallest_type_that_fits(longest, dtype):
    dataset = TokenDataset((np.zeros(longest + 1, np.uint8), np.array([0, 1, longest + 1])))
    assert dataset.lengths.tolist() == [1, longest]
    assert dataset.lengths.dtype == dtype


# Rows that cannot be trained on.


@pytest.mark.parametrize(
    ("column", "row"),
    [
        (pa.array([[1], None, [2]]), 1),
        (pa.array([[1], [2], [3, None]]), 2),
        (pa.array([[0], [1], [2], [3, None]]).slice(1), 2),
        (pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)), 1),
        (pa.array([None, None], pa.list_(pa.int8(), 1)), 0),
        (pa.array([[], [None]], pa.list_(pa.null())), 1),
        (pa.chunked_array([[[1], [2]], [[3], [None, 4]]]), 3),
        (pa.array([[[1]], [[2]], None]), None),
    ],
)
@pytest.mark.report("apache/arrow#35359")
def test_a_null_is_an_error_that_names_its_row(column, row):
    if row is None:  # a null row of shape (1, L): not a list of numbers
        with pytest.raises(TypeError, match="must be a list of numbers"):
            TokenDataset(pa.table({"input_ids": column}))
        return
    with pytest.raises(ValueError, match=f"row {row} of column 'input_ids' is null or holds a null"):
        TokenDataset(pa.table({"input_ids": column}))


def test_a_null_in_an_unused_part_of_the_values_does_not_matter():
    column = pa.array([[None], [1, 2], [None]]).slice(1, 1)
    assert tokens(TokenDataset(pa.table({"input_ids": column}))) == [[1, 2]]


def test_a_null_scalar_is_an_error_a_null_object_is_none():
    with pytest.raises(ValueError, match="row 1 of column 'weight'"):
        TokenDataset({"input_ids": [[1], [2]], "weight": [1.0, None]})
    assert TokenDataset({"input_ids": [[1], [2]], "source": ["a", None]})[1]["source"] is None


def test_token_columns_of_other_lengths_name_the_row():
    with pytest.raises(ValueError, match="row 1 has 2 tokens but 3 values of 'labels'"):
        TokenDataset({"input_ids": [[1], [2, 3]], "labels": [[1], [2, 3, 4]]})
    source = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "labels": [[1], []]})
    assert tokens(TokenDataset(source.select([0]))) == [[1]]
    with pytest.raises(ValueError, match="row 0 has 1 tokens but 0 values of 'labels'"):
        TokenDataset(source.select([1, 0]))


@pytest.mark.parametrize("offsets", [[0, 2, 1], [0, 5], [-1, 2], [3, 0]])
def test_corrupt_offsets_are_found_when_the_data_set_is_opened(offsets):
    with pytest.raises(ValueError, match="corrupt"):
        TokenDataset((np.zeros(4, np.int32), np.array(offsets)))


def test_empty_rows_are_left_out_and_counted():
    dataset = TokenDataset([[], [1], [], [2, 3]])
    assert tokens(dataset) == [[1], [2, 3]]
    assert dataset.rows.tolist() == [1, 3]
    assert dataset.report.empty_sequences == 2
    assert len(TokenDataset([[], []])) == 0
    assert len(TokenDataset([])) == 0


# Over-long rows. Row 0 has 5 tokens, row 1 none, row 2 three; the bound is 4.

LONG = {"input_ids": [[0, 1, 2, 3, 4], [], [5, 6, 7]], "weight": [1, 2, 3]}


@pytest.mark.report("huggingface/trl#5075")
def test_overlong_rows_are_an_error_by_default():
    with pytest.raises(
        ValueError, match=r"1 of 3 rows are above max_length=4 \(row 0 is the first, the longest has 5"
    ):
        TokenDataset(LONG, max_length=4)
    assert len(TokenDataset(LONG, max_length=5)) == 2


@pytest.mark.parametrize(
    ("overlong", "done", "expected", "rows", "starts", "lost"),
    [
        ("truncate", "truncated", [[0, 1, 2, 3], [5, 6, 7]], [0, 2], [0, 0], 1),
        ("split", "split", [[0, 1, 2, 3], [4], [5, 6, 7]], [0, 0, 2], [0, 4, 0], 0),
        ("drop", "dropped", [[5, 6, 7]], [2], [0], 5),
    ],
)
@pytest.mark.report("huggingface/trl#5189")
def test_overlong_rows(overlong, done, expected, rows, starts, lost, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = TokenDataset(LONG, max_length=4, overlong=overlong)
    assert tokens(dataset) == expected
    assert dataset.lengths.tolist() == [len(row) for row in expected]
    assert (dataset.rows.tolist(), dataset.starts.tolist()) == (rows, starts)
    assert [dataset[i]["weight"].item() for i in range(len(dataset))] == [row + 1 for row in rows]
    report = dataset.report
    assert (report.num_sequences, report.num_tokens) == (len(expected), sum(map(len, expected)))
    assert (report.empty_sequences, report.overlong_sequences, report.lost_tokens) == (1, 1, lost)
    assert [record.message for record in caplog.records] == [
        f"1 rows above max_length=4 were {done}; {lost} tokens are lost."
    ]
    caplog.clear()
    assert tokens(pickle.loads(pickle.dumps(dataset))) == expected
    assert not caplog.records


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 20))
@pytest.mark.report("meta-pytorch/torchtune#1689")
@pytest.mark.report("huggingface/trl#1850")
def test_split_keeps_every_token_in_order(lengths, max_length):
    values = np.arange(sum(lengths))
    source = (values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    dataset = TokenDataset(source, max_length=max_length, overlong="split")
    pieces = tokens(dataset)
    assert [token for piece in pieces for token in piece] == values.tolist()
    assert len(pieces) == sum(-(-length // max_length) for length in lengths)
    assert all(0 < len(piece) <= max_length for piece in pieces)


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="max_length is 0"):
        TokenDataset(ROWS, max_length=0)
    with pytest.raises(TypeError, match=r"max_length must be a whole number, not 1\.5"):
        TokenDataset(ROWS, max_length=1.5, overlong="split")
    with pytest.raises(ValueError, match="overlong 'cut' is none of 'error'"):
        TokenDataset(ROWS, max_length=2, overlong="cut")


# Use.


def test_rows_are_reached_like_those_of_a_sequence():
    dataset = TokenDataset(ROWS)
    assert dataset[-1]["input_ids"].tolist() == [5, 6]
    assert dataset[np.int64(1)]["input_ids"].tolist() == [4]
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            dataset[wrong]
    assert [row["source"] for row in dataset] == ["web", "books", "code"]


def test_a_selection_is_a_sequence_of_rows():
    selection = TokenDataset(ROWS).__getitems__([2, 0])
    assert len(selection) == 2
    assert selection[0]["input_ids"].tolist() == [5, 6]
    assert [row["source"] for row in selection] == ["code", "web"]
    assert [row["source"] for row in selection[1:]] == ["web"]
    assert (tuple(selection.bin_offsets), selection.repeated) == ((0, 2), False)
    with pytest.raises(IndexError, match=r"sequence 3 is outside 0\.\.2"):
        TokenDataset(ROWS).__getitems__([0, 3])
    with pytest.raises(IndexError, match=r"sequence -1 is outside 0\.\.2"):
        TokenDataset(ROWS).__getitems__([-1])
    for ids in ([1.7], [True, False]):
        with pytest.raises(TypeError, match=r"ids must be whole numbers, not (float64|bool)"):
            TokenDataset(ROWS).__getitems__(ids)


def test_a_selection_keeps_what_a_sampler_noted_on_its_batch():
    class Noted(list):
        bin_offsets = (0, 1, 2)
        repeated = True

    selection = TokenDataset(ROWS).__getitems__(Noted([1, 2]))
    assert (selection.bin_offsets, selection.repeated) == ((0, 1, 2), True)
    copy = pickle.loads(pickle.dumps(selection))
    assert (copy.ids.tolist(), copy.bin_offsets, copy.repeated) == ([1, 2], (0, 1, 2), True)


def test_arrays_of_the_other_byte_order_keep_their_values():
    for order in "<>":
        values = np.arange(10, dtype=f"{order}i4")
        dataset = TokenDataset((values, np.array([0, 3, 10])))
        assert dataset[1]["input_ids"].tolist() == [3, 4, 5, 6, 7, 8, 9]
        assert TokenDataset([values])[0]["input_ids"].tolist() == list(range(10))


def test_memory_mapped_data_do_not_travel_in_the_pickle(tmp_path):
    num_values = 2_000_000
    source = on_disk(tmp_path, {"input_ids": [np.arange(num_values // 2)] * 2})
    dataset = TokenDataset(source)
    assert len(pickle.dumps(dataset)) < 100_000
    np.arange(num_values, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", np.arange(num_values, dtype=np.uint16))
    offsets = np.array([0, 5, num_values])
    for mapped in (
        np.memmap(tmp_path / "tokens.bin", np.uint16, "r"),
        np.memmap(tmp_path / "tokens.bin", np.uint16, "r", offset=10, shape=(num_values - 5,)),
        np.load(tmp_path / "tokens.npy", mmap_mode="r"),
    ):
        pair = TokenDataset((mapped, np.minimum(offsets, len(mapped))))
        pickled = pickle.dumps(pair)
        assert len(pickled) < 100_000
        assert pickle.loads(pickled)[0]["input_ids"].tolist() == mapped[:5].tolist()
    view = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")[7:]  # its place in the file is not known
    assert pickle.loads(pickle.dumps(TokenDataset((view, offsets[:2]))))[0]["input_ids"].tolist() == [
        7,
        8,
        9,
        10,
        11,
    ]


def test_a_slice_of_a_table_pickles_only_its_rows():
    table = pa.table({"input_ids": [list(range(1000))] * 1000}).slice(500, 1)
    assert len(pickle.dumps(TokenDataset(table))) < 20_000


def test_several_threads_read_at_once():
    dataset = TokenDataset(
        {"input_ids": [[i] * (i % 7 + 1) for i in range(500)], "name": [str(i) for i in range(500)]}
    )
    wrong = []

    def read(start):
        for i in range(start, 500, 4):
            row = dataset[i]
            if row["input_ids"].tolist() != [i] * (i % 7 + 1) or row["name"] != str(i):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_corrupt_arrow_file_is_an_error_not_a_crash(tmp_path):
    # Arrow reads files without looking at the offsets.
    table = pa.table({"input_ids": pa.array([[7] * 50, [8] * 50], pa.list_(pa.int32()))})
    with pa.ipc.new_stream(tmp_path / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    good = (tmp_path / "data.arrow").read_bytes()
    offsets = np.array([0, 50, 100], np.int32).tobytes()
    assert good.count(offsets) == 1
    bad = np.array([0, 50, 2**30], np.int32).tobytes()
    (tmp_path / "data.arrow").write_bytes(good.replace(offsets, bad))
    with pa.memory_map(str(tmp_path / "data.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    with pytest.raises(ValueError, match=r"row 1 has offsets 50\.\.1073741824 into 100 values"):
        TokenDataset(table)


def test_sequences_without_targets_are_counted_and_dropped_where_asked() -> None:
    # Prompt of 10, answer of 5. Cut to 8 tokens: 8 without a target, 7 cut off; in fragments: 8 (0 targets)
    # and 7 (5).
    row = {"input_ids": list(range(15)), "labels": [-100] * 10 + list(range(10, 15))}
    short = {"input_ids": [1, 2], "labels": [-100, 2]}
    cut = TokenDataset([row, short], max_length=8, overlong="truncate", without_targets="drop")
    assert (cut.lengths.tolist(), cut.rows.tolist()) == ([2], [1])
    report = cut.report
    assert (report.sequences_without_targets, report.tokens_without_targets, report.lost_tokens) == (1, 8, 7)
    assert (report.num_sequences, report.num_tokens, report.num_target_tokens) == (1, 2, 1)
    split = TokenDataset([row], max_length=8, overlong="split", without_targets="drop")
    assert (split.lengths.tolist(), split.starts.tolist(), split.report.num_target_tokens) == ([7], [8], 5)
    kept = TokenDataset([row, short], max_length=8, overlong="truncate")
    assert (len(kept), kept.report.num_target_tokens) == (2, None)


def test_masks_choose_targets_and_a_first_token_is_none() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0], "completion_mask": [1, 1, 1]},
        {"input_ids": [4, 5], "loss_mask": [0, 1], "completion_mask": [1, 1]},
        {"input_ids": [6], "loss_mask": [1], "completion_mask": [1]},
    ]
    dataset = TokenDataset(rows, without_targets="drop")
    assert dataset.rows.tolist() == [1]
    batch = PackedCollator()(dataset.__getitems__([0]))
    assert batch["num_target_tokens"] == dataset.report.num_target_tokens == 1
    pickled = pickle.loads(pickle.dumps(dataset))
    assert pickled[0]["input_ids"].tolist() == [4, 5]


def test_no_targets_are_an_error_where_asked() -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    with pytest.raises(ValueError, match=r"1 of 2 sequences have no target \(row 1 is the first\)"):
        TokenDataset(rows, without_targets="error")
    with pytest.raises(ValueError, match="without_targets"):
        TokenDataset(rows, without_targets="ignore")


PACKED_ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5], "seq_lengths": [2, 3], "tag": "a"},
    {"input_ids": [6], "labels": [6], "seq_lengths": [1], "tag": "b"},
    {"input_ids": [7, 8, 9], "labels": [7, 8, 9], "seq_lengths": [1, 0, 2], "tag": "c"},
]
POSITIONS = [[0, 1, 0, 1, 2], [0], [0, 0, 1]]


@pytest.mark.parametrize("by", ["seq_lengths", "position_ids", "both"])
@pytest.mark.parametrize("order", [None, [2, 0]])
def test_rows_that_were_packed_before_keep_their_boundaries(by, order):
    rows = [{**row, "position_ids": positions} for row, positions in zip(PACKED_ROWS, POSITIONS, strict=True)]
    left_out = {"seq_lengths": "position_ids", "position_ids": "seq_lengths", "both": ""}[by]
    source = datasets.Dataset.from_list([{k: v for k, v in row.items() if k != left_out} for row in rows])
    expected = [[1, 2], [3, 4, 5], [6], [7], [8, 9]]
    sequences = TokenDataset(source if order is None else source.select(order))
    if order is not None:
        expected = [[7], [8, 9], [1, 2], [3, 4, 5]]
    assert [sequences[i]["input_ids"].tolist() for i in range(len(sequences))] == expected
    assert sequences.rows.tolist() == ([0, 0, 1, 2, 2] if order is None else [0, 0, 1, 1])
    batch = PackedCollator()(sequences.__getitems__(range(2)))
    assert batch["cu_seq_lens_q"].tolist() == [0, *np.cumsum([len(e) for e in expected[:2]])]
    again = pickle.loads(pickle.dumps(sequences))
    assert [again[i]["input_ids"].tolist() for i in range(len(again))] == expected
    assert again[1]["tag"] == sequences[1]["tag"]


def test_packed_sequences_are_cut_and_split_as_rows_are():
    cut = TokenDataset(PACKED_ROWS[:1], max_length=2, overlong="truncate")
    assert [cut[i]["input_ids"].tolist() for i in range(len(cut))] == [[1, 2], [3, 4]]
    split = TokenDataset(PACKED_ROWS[:1], max_length=2, overlong="split")
    assert [split[i]["input_ids"].tolist() for i in range(len(split))] == [[1, 2], [3, 4], [5]]
    drop = TokenDataset(PACKED_ROWS[:1], max_length=2, overlong="drop", without_targets="drop")
    assert len(drop) == 0  # [1, 2] has its only label on its first token


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seq_lengths": [2]}, "row 1: seq_lengths add up to 2, and the row has 3 tokens"),
        ({"seq_lengths": [4, -1]}, "row 1: seq_lengths add up to 3, and the row has 3 tokens"),
        (
            {"position_ids": [0, 2, 3]},
            "row 1: position_ids have 2 at token 1; they must begin at 0 and count on",
        ),
        ({"position_ids": [1, 2, 3]}, "row 1: position_ids have 1 at token 0"),
        ({"position_ids": [0, 1]}, "row 1 has 3 tokens but 2 values of 'position_ids'"),
        ({"position_ids": [0, 1, 0], "seq_lengths": [3]}, "boundaries of sequences in different places"),
    ],
)
def test_boundaries_that_contradict_the_tokens_are_named(more, message):
    right = {"seq_lengths": [1, 2], "position_ids": [0, 0, 1]}
    rows = [
        {"input_ids": [1, 2, 3], **{name: right[name] for name in more}},
        {"input_ids": [4, 5, 6], **more},
    ]
    with pytest.raises(ValueError, match=message):
        TokenDataset(rows)
    assert len(TokenDataset(rows, columns=[])) == 2
