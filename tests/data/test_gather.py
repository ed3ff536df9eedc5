"""The compiled gather against plain Python, over random Arrow layouts and with corrupt data."""

from __future__ import annotations

import threading
import time
import timeit
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import ELEMENTS, FLOATS, INTEGERS, column_of, random_values, rows_of
from oracles import gathered, gathered_labels, segments

from multipack import _core
from multipack.data.columns import read_numbers, read_tokens


@pytest.fixture(params=_core.instruction_sets())
def instruction_set(request):
    _core.use_instruction_set(request.param)
    yield request.param
    _core.use_instruction_set(_core.instruction_sets()[-1])


def flat_column(values: np.ndarray) -> _core.Column:
    """One row with all values."""
    return read_tokens(
        pa.chunked_array([pa.ListArray.from_arrays([0, len(values)], pa.array(values))])
    ).reader


def list_column(rows: list[list[int]]) -> _core.Column:
    return read_tokens(pa.chunked_array([pa.array(rows, pa.list_(pa.int32()))])).reader


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def gather_tokens(column, rows, starts, lengths, places, num_slots, dtype, fill=0):
    out = np.empty(num_slots, dtype)
    gather = _core.Gather(
        int64(*rows), None if starts is None else int64(*starts), int64(*lengths), int64(*places), num_slots
    )
    gather.tokens(column, out, fill)
    assert gather.run() == 0
    return out


@pytest.mark.parametrize(
    ("element", "dtype"),
    [*product(ELEMENTS, [np.float32, np.bool_]), *((element, np.int64) for element in (*INTEGERS, "bool"))],
)
def test_every_type_widens_as_numpy_casts(element, dtype, instruction_set):
    # Lengths around every vector width, so that main loops and tails are met.
    values = random_values(element, 300, seed=1)
    for count in [*range(70), 300]:
        out = gather_tokens(flat_column(values), [0], [300 - count], [count], [0], count, dtype)
        np.testing.assert_array_equal(out, values[300 - count :].astype(dtype))


def test_half_precision_is_exact_for_every_bit_pattern(instruction_set):
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    out = gather_tokens(flat_column(values), [0], None, [2**16], [0], 2**16, np.float32)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(
        out.view(np.uint32)[finite], values[finite].astype(np.float32).view(np.uint32)
    )
    assert np.isnan(out[~finite]).all()


@pytest.mark.parametrize("element", FLOATS)
def test_floats_are_not_cut_to_integers(element):
    with pytest.raises(ValueError, match="floats cannot become int64"):
        gather_tokens(flat_column(np.ones(1, element)), [0], None, [1], [0], 1, np.int64)


def test_unsigned_values_above_int64_are_an_error():
    column = read_tokens(pa.chunked_array([pa.array([[1], [2**63]], pa.list_(pa.uint64()))])).reader
    assert gather_tokens(column, [0], None, [1], [0], 1, np.int64).tolist() == [1]
    with pytest.raises(ValueError, match=r"row 1 holds a value above 2\^63 - 1"):
        gather_tokens(column, [1], None, [1], [0], 1, np.int64)
    gather = _core.Gather(int64(1), None, int64(1), int64(0), 1)
    gather.labels(column, [], np.empty(1, np.int64), -100, False)
    with pytest.raises(ValueError, match=r"row 1 holds a value above 2\^63 - 1"):
        gather.run()


@st.composite
def _batches(draw):
    """Rows in a random layout, and a batch of parts of them with gaps between."""
    element = draw(st.sampled_from(ELEMENTS))
    sizes = draw(
        st.lists(st.integers(0, 40), min_size=1, max_size=12) | st.lists(st.just(5), min_size=1, max_size=9)
    )
    rows = draw(rows_of(element, sizes))
    column = draw(column_of(rows))
    ids = draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    starts = [draw(st.integers(0, len(rows[i]))) for i in ids]
    lengths = [draw(st.integers(0, len(rows[i]) - start)) for i, start in zip(ids, starts, strict=True)]
    gaps = draw(st.lists(st.integers(0, 9), min_size=len(ids) + 1, max_size=len(ids) + 1))
    places = (np.cumsum(gaps[:-1]) + np.cumsum(lengths) - lengths).astype(int).tolist() if ids else []
    return rows, column, ids, starts, lengths, places, sum(lengths) + sum(gaps)


@given(_batches())
def test_random_rows_of_random_layouts(batch):
    rows, column, ids, starts, lengths, places, num_slots = batch
    reader = read_tokens(column)
    dtype = {"int64": np.int64, "float32": np.float32, "bool": np.bool_}[
        str(reader.dtype).removeprefix("torch.")
    ]
    all_rows = np.empty(len(rows), np.int64)
    reader.reader.lengths(np.arange(len(rows)), all_rows)
    assert all_rows.tolist() == [len(row) for row in rows]
    out = gather_tokens(reader.reader, ids, starts, lengths, places, num_slots, dtype, fill=1)
    expected = gathered(
        [row.astype(dtype).tolist() for row in rows], ids, starts, lengths, places, num_slots, fill=1
    )
    assert out.tolist() == expected


@given(_batches(), st.data(), st.booleans())
def test_labels_are_masked_and_counted(batch, data, mask_first):
    rows, column, ids, starts, lengths, places, num_slots = batch
    masks = [
        data.draw(rows_of(data.draw(st.sampled_from(ELEMENTS)), [len(row) for row in rows]))
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    labels = read_tokens(column)
    dtype = np.float32 if str(labels.dtype) == "torch.float32" else np.int64
    out = np.empty(num_slots, dtype)
    gather = _core.Gather(int64(*ids), int64(*starts), int64(*lengths), int64(*places), num_slots)
    mask_columns = [read_tokens(data.draw(column_of(mask))).reader for mask in masks]
    gather.labels(labels.reader, mask_columns, out, -100, mask_first)
    num_targets = gather.run()
    expected = gathered_labels(
        [row.astype(dtype).tolist() for row in rows],
        [[row.astype(bool).tolist() for row in mask] for mask in masks],
        ids, starts, lengths, places, num_slots, ignore_index=-100, mask_first=mask_first,
    )  # fmt: skip
    assert out.tolist() == expected
    assert num_targets == sum(label != -100 for label in expected)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(-3, 3), st.integers(1, 4))
def test_positions_and_segment_numbers(sizes, first_position, rows_per_batch):
    sizes = sizes * rows_per_batch  # equal rows of several segments each
    boundaries = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    num_slots = int(boundaries[-1])
    positions, numbers = np.empty(num_slots, np.int64), np.empty(num_slots, np.int32)
    gather = _core.Gather(int64(), None, int64(), int64(), num_slots)
    gather.segments(boundaries, positions, numbers, first_position, num_slots // rows_per_batch)
    gather.run()
    expected = segments(sizes, first_position, num_slots // rows_per_batch)
    assert (positions.tolist(), numbers.tolist()) == expected


@pytest.mark.parametrize("element", [*INTEGERS, *FLOATS, "bool"])
def test_a_scalar_column_reads_as_rows_of_one(element):
    values = random_values(element, 20, seed=2)
    chunks = [pa.array(values).slice(3, 4), pa.array(values).slice(11, 5)]
    column = read_numbers(pa.chunked_array(chunks))
    dtype = {"int64": np.int64, "float32": np.float32, "bool": np.bool_}[
        str(column.dtype).removeprefix("torch.")
    ]
    out = gather_tokens(column.reader, [8, 0, 4], None, [1, 1, 1], [0, 1, 2], 3, dtype)
    assert out.tolist() == values[[15, 3, 11]].astype(dtype).tolist()


def test_a_row_is_found_among_chunks_of_very_different_sizes():
    # 1 row, then 5000 rows, then 300 chunks of 1 row: row r is [r].
    sizes = [1, 5000, *[1] * 300, 7]
    first = np.cumsum(sizes) - sizes
    arrays = [
        pa.array(np.arange(a, a + n).reshape(-1, 1).tolist()) for a, n in zip(first, sizes, strict=True)
    ]
    column = read_tokens(pa.chunked_array(arrays)).reader
    rows = np.arange(sum(sizes))
    assert column.num_rows == len(rows)
    out = gather_tokens(column, rows, None, np.ones_like(rows), rows, len(rows), np.int64)
    np.testing.assert_array_equal(out, rows)


# Corrupt data: an error, never a read outside the buffers.


def raw_column(offsets: np.ndarray, num_values: int) -> _core.Column:
    chunk = _core.Chunk(
        len(offsets) - 1, offsets.view(np.uint8), np.zeros(num_values, np.uint8), 0, num_values
    )
    return _core.Column("uint8", offsets.itemsize, 0, [chunk])


@given(st.data(), st.sampled_from([np.int32, np.int64]))
def test_corrupt_offsets_are_an_error_that_names_the_row(data, dtype):
    limits = np.iinfo(dtype)
    near = st.integers(-3, 23)
    anything = st.integers(limits.min, limits.max)
    offsets = np.array(data.draw(st.lists(near | anything, min_size=2, max_size=6)), dtype)
    column = raw_column(offsets, num_values=20)
    for row, (begin, end) in enumerate(zip(offsets.tolist()[:-1], offsets.tolist()[1:], strict=True)):
        length = np.empty(1, np.int64)
        if 0 <= begin <= end <= 20:
            column.lengths(int64(row), length)
            assert length[0] == end - begin
        else:
            with pytest.raises(ValueError, match=f"row {row} has offsets {begin}..{end} into 20 values"):
                column.lengths(int64(row), length)


@pytest.mark.parametrize(
    ("rows", "starts", "lengths", "places", "error"),
    [
        ([2], None, [0], [0], IndexError),  # no such row
        ([-1], None, [0], [0], IndexError),
        ([0], None, [4], [0], ValueError),  # row 0 has 3 elements
        ([0], [2], [2], [0], ValueError),
        ([0], [-1], [2], [0], ValueError),
        ([0], [2**63 - 1], [2], [0], ValueError),
        ([0], None, [-1], [0], ValueError),
        ([0], None, [3], [8], ValueError),  # leaves the 10 slots
        ([0], None, [3], [-1], ValueError),
        ([0, 1], None, [3, 2], [0, 2], ValueError),  # overlaps
        ([0, 1], None, [3, 2], [5, 0], ValueError),  # goes back
    ],
)
def test_a_sequence_outside_its_row_or_the_batch_is_an_error(rows, starts, lengths, places, error):
    with pytest.raises(error):
        gather_tokens(list_column([[1, 2, 3], [4, 5]]), rows, starts, lengths, places, 10, np.int64)


def test_outputs_may_share_memory_with_the_places_they_go_to():
    # What is written must not change where the rest is written.
    lengths, places = int64(1, 1, 1), int64(0, 1, 2)
    gather = _core.Gather(int64(0, 0, 0), None, lengths, places, 3)
    column = list_column([[1 << 30]])
    gather.tokens(column, lengths, 0)
    gather.tokens(column, places, 0)
    boundaries = np.array([0, 1, 3], np.int32)
    numbers = np.lib.stride_tricks.as_strided(boundaries)
    gather.segments(boundaries, np.empty(3, np.int64), numbers, 1 << 40, 3)
    gather.run()
    assert lengths.tolist() == places.tolist() == [1 << 30] * 3
    assert boundaries.tolist() == [0, 1, 1]


def test_outputs_may_be_added_while_a_batch_is_written():
    num_slots = 1 << 16
    gather = _core.Gather(int64(0), None, int64(num_slots), int64(0), num_slots)
    column = flat_column(np.ones(num_slots, np.int32))
    outs = [np.zeros(num_slots, np.bool_) for _ in range(300)]
    thread = threading.Thread(target=lambda: [gather.tokens(column, out, 0) for out in outs])
    thread.start()
    while thread.is_alive():
        gather.run()
    thread.join()
    gather.run()
    assert all(out.all() for out in outs)


@pytest.mark.parametrize("fill", [2.0**63, -(2.0**64), float("inf"), float("nan")])
def test_padding_that_does_not_fit_is_an_error(fill):
    column = list_column([[1]])
    with pytest.raises(ValueError, match=r"the padding .* does not fit int64"):
        gather_tokens(column, [0], None, [1], [0], 2, np.int64, fill)
    assert gather_tokens(column, [0], None, [1], [0], 2, np.float32, fill)[0] == 1


@pytest.mark.parametrize("ignore_index", [2**63 - 1, -(2**63), -(2**53) - 1, -100])
def test_ignored_labels_are_the_same_number_everywhere(ignore_index):
    out = np.empty(4, np.int64)
    gather = _core.Gather(int64(0), None, int64(3), int64(0), 4)
    mask = list_column([[1, 0, 1]])
    gather.labels(list_column([[5, 6, 7]]), [mask], out, ignore_index, True)
    assert gather.run() == 1
    assert out.tolist() == [ignore_index, ignore_index, 7, ignore_index]


@pytest.mark.parametrize("boundaries", [[], [0], [0, 3], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4], [0, 5]])
def test_boundaries_that_do_not_tile_the_slots_are_an_error(boundaries):
    gather = _core.Gather(int64(), None, int64(), int64(), 4)
    gather.segments(np.array(boundaries, np.int32), np.empty(4, np.int64), np.empty(4, np.int32), 0, 4)
    with pytest.raises(ValueError, match="increase strictly from 0 to the number of slots, 4"):
        gather.run()


@pytest.mark.parametrize(
    ("element", "offset_bytes", "row_length", "chunk"),
    [
        ("int32", 4, 0, (2, np.zeros(8, np.uint8), np.zeros(40, np.uint8), 0, 10)),  # 2 rows need 3 offsets
        ("int32", 4, 0, (1, None, np.zeros(40, np.uint8), 0, 10)),
        ("int32", 4, 0, (1, np.zeros(8, np.uint8), np.zeros(39, np.uint8), 0, 10)),  # 10 int32 need 40 bytes
        ("int32", 4, 0, (1, np.zeros(8, np.uint8), np.zeros(40, np.uint8), 1, 10)),
        ("bit", 4, 0, (1, np.zeros(8, np.uint8), np.zeros(1, np.uint8), 0, 9)),
        ("int32", 0, 3, (4, None, np.zeros(40, np.uint8), 0, 10)),  # 4 rows of 3 need 12 values
        ("int32", 0, 0, (2**63 - 1, None, None, 0, 2**63 - 1)),
        ("int32", 0, 2**62, (4, None, np.zeros(40, np.uint8), 0, 10)),
        ("int32", 4, 0, (-1, np.zeros(8, np.uint8), np.zeros(40, np.uint8), 0, 10)),
        ("int32", 4, 0, (1, np.zeros(8, np.uint8), np.zeros(40, np.uint8), 0, 2**63 - 1)),
        ("int32", 3, 0, (1, np.zeros(8, np.uint8), np.zeros(40, np.uint8), 0, 10)),
        ("int33", 4, 0, (1, np.zeros(8, np.uint8), np.zeros(40, np.uint8), 0, 10)),
    ],
)
def test_buffers_that_are_too_small_are_refused(element, offset_bytes, row_length, chunk):
    with pytest.raises(ValueError):
        _core.Column(element, offset_bytes, row_length, [_core.Chunk(*chunk)])


def test_more_rows_than_64_bits_count_are_refused():
    # Rows without values need no memory, so only their number is left to look at.
    chunk = _core.Chunk(2**62, None, None, 0, 0)
    column = _core.Column("int32", 0, 0, [chunk])
    length = np.ones(1, np.int64)
    column.lengths(int64(2**62 - 1), length)
    assert (column.num_rows, length[0]) == (2**62, 0)
    with pytest.raises(ValueError, match="more rows than 64 bits count"):
        _core.Column("int32", 0, 0, [chunk, chunk])


def test_a_row_length_beside_offsets_is_not_read():
    offsets = np.array([0, 1, 3, 4], np.int32).view(np.uint8)
    column = _core.Column("int32", 4, 2**62, [_core.Chunk(3, offsets, np.zeros(16, np.uint8), 0, 4)])
    length = np.empty(1, np.int64)
    column.lengths(int64(2), length)
    assert length[0] == 1


def test_outputs_that_cannot_be_written_are_refused():
    gather = _core.Gather(int64(0), None, int64(3), int64(0), 3)
    column = list_column([[1, 2, 3]])
    fixed = np.zeros(3, np.int64)
    fixed.flags.writeable = False
    with pytest.raises(TypeError):
        gather.tokens(column, fixed, 0)
    with pytest.raises(TypeError):
        gather.tokens(column, np.zeros((3, 2), np.int64)[:, 0], 0)
    with pytest.raises(ValueError, match="multiple of its element's size"):
        gather.tokens(column, np.zeros(25, np.uint8)[1:].view(np.int64), 0)


def test_outputs_of_another_size_or_type_are_refused():
    gather = _core.Gather(int64(0), None, int64(3), int64(0), 3)
    column = list_column([[1, 2, 3]])
    with pytest.raises(ValueError, match="an output has 4 slots, the batch 3"):
        gather.tokens(column, np.empty(4, np.int64), 0)
    with pytest.raises(TypeError, match="int64, float32 or bool"):
        gather.tokens(column, np.empty(3, np.int16), 0)
    with pytest.raises(TypeError, match="labels must be int64 or float32"):
        gather.labels(column, [], np.empty(3, np.bool_), -100, True)
    with pytest.raises(ValueError, match="equal lengths"):
        _core.Gather(int64(0), None, int64(3, 4), int64(0), 3)


def test_unknown_instruction_set():
    with pytest.raises(ValueError, match="no instruction set mmx"):
        _core.use_instruction_set("mmx")


def test_values_at_odd_addresses_are_read():
    # Arrow asks for aligned buffers, files and slices of bytes do not always have them.
    data = b"x" + np.array([5, -6, 7], np.int32).tobytes()
    offsets = b"x" + np.array([0, 1, 3], np.int64).tobytes()
    column = _core.Column(
        "int32",
        8,
        0,
        [_core.Chunk(2, np.frombuffer(offsets, np.uint8)[1:], np.frombuffer(data, np.uint8)[1:], 0, 3)],
    )
    assert gather_tokens(column, [1, 0], None, [2, 1], [0, 2], 3, np.int64).tolist() == [-6, 7, 5]


def test_the_interpreter_is_free_while_a_batch_is_written():
    # Another thread notes the time in a loop. Were the interpreter locked, its first note after the start of
    # a run could only come after the end; on a busy machine it may take some tries until one comes in the
    # first half.
    num_slots = 1 << 23
    gather = _core.Gather(int64(0), None, int64(num_slots), int64(0), num_slots)
    gather.tokens(flat_column(np.ones(num_slots, np.int32)), np.empty(num_slots, np.int64), 0)
    duration = min(timeit.repeat(gather.run, number=1, repeat=3))
    assert any(first_note_after_the_start(gather.run) < duration / 2 for _ in range(50))


def first_note_after_the_start(run) -> float:
    notes: list[float] = []
    stop = threading.Event()

    def note_the_time():
        while not stop.is_set():
            notes.append(time.perf_counter())

    thread = threading.Thread(target=note_the_time)
    thread.start()
    while not notes:
        time.sleep(0)
    start = time.perf_counter()
    run()
    while notes[-1] < start:
        time.sleep(0)
    stop.set()
    thread.join()
    return min(note for note in notes if note > start) - start
