"""Packing of streams: every row once, full bins, the position saved with the rows that wait."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

import multipack
from multipack import PackedCollator, _core
from multipack.data.dataset import TokenDataset
from multipack.order.stream import StreamPacker

CAPACITY = 64


def make_rows(lengths):
    """Rows whose tokens all name the row, so that batches show what became of them."""
    return [
        {"input_ids": [row] * length, "labels": list(range(length))} for row, length in enumerate(lengths)
    ]


LENGTHS = np.random.default_rng(0).integers(1, 60, 500).tolist()
ROWS = make_rows(LENGTHS)


def row_ids(batch):
    return [sequence["input_ids"][0].item() for sequence in batch]


@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80),
    pool_size=st.integers(1, 30),
    bins_per_batch=st.integers(1, 3),
    limit=st.none() | st.integers(1, 4),
)
def test_each_row_once_within_capacity(lengths, pool_size, bins_per_batch, limit):
    packer = StreamPacker(
        make_rows(lengths),
        CAPACITY,
        pool_size=pool_size,
        bins_per_batch=bins_per_batch,
        max_sequences_per_bin=limit,
    )
    seen = []
    for batch in packer:
        ids = row_ids(batch)
        for a, b in zip(batch.bin_offsets[:-1], batch.bin_offsets[1:], strict=True):
            assert sum(lengths[row] for row in ids[a:b]) <= CAPACITY
            assert limit is None or b - a <= limit
        assert len(batch.bin_offsets) - 1 <= bins_per_batch
        assert [len(sequence["labels"]) for sequence in batch] == [lengths[row] for row in ids]
        seen += ids
    assert sorted(seen) == list(range(len(lengths)))


def test_bins_are_as_full_as_those_of_the_stream_method():
    lengths = np.random.default_rng(1).integers(1, 20, 2000).tolist()
    batches = list(StreamPacker(make_rows(lengths), CAPACITY, pool_size=128))
    assert len(batches) == -(-sum(lengths) // CAPACITY)


def test_the_order_of_arrival_is_nearly_kept():
    order = [row for batch in StreamPacker(ROWS, CAPACITY, pool_size=32) for row in row_ids(batch)]
    delays = [position - row for position, row in enumerate(order)]
    assert max(delays) < 6 * 32
    assert min(delays) > -32


@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, multipack.DataLoader])
def test_any_loader_takes_it(loader):
    packer = StreamPacker(ROWS, CAPACITY, pool_size=64)
    batches = list(loader(packer, batch_size=None, collate_fn=PackedCollator(), num_workers=0))
    assert sum(batch["num_tokens"] for batch in batches) == sum(LENGTHS)
    assert all(batch["input_ids"].shape == (1, batch["num_tokens"]) for batch in batches)
    assert all(batch["num_tokens"] <= CAPACITY for batch in batches)


def test_worker_processes_share_the_rows():
    loader = torch.utils.data.DataLoader(
        StreamPacker(ROWS, CAPACITY, pool_size=64),
        batch_size=None,
        num_workers=2,
        collate_fn=row_ids,
        multiprocessing_context="fork",
    )
    assert sorted(row for batch in loader for row in batch) == list(range(len(ROWS)))


@pytest.mark.parametrize("source", ["rows", "hugging_face"])
@pytest.mark.parametrize("stop", [0, 1, 7, 100, "last"])
def test_resumed_goes_on_as_if_never_stopped(source, stop):
    def packer():
        rows = (
            datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=4)
            if source == "hugging_face"
            else ROWS
        )
        return StreamPacker(rows, CAPACITY, pool_size=40, bins_per_batch=2)

    whole = [row_ids(batch) for batch in packer()]
    stop = len(whole) if stop == "last" else stop
    first = packer()
    batches = iter(first)
    assert [row_ids(next(batches)) for _ in range(stop)] == whole[:stop]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = packer()
    second.load_state_dict(state)
    assert [row_ids(batch) for batch in second] == whole[stop:]
    assert [row_ids(batch) for batch in second] == whole  # the next pass begins anew


def test_a_prefetching_loader_saves_what_was_yielded():
    def loader(packer):
        return multipack.DataLoader(
            packer,
            batch_size=None,
            collate_fn=row_ids,
            num_workers=1,
            prefetch_batches=5,
            worker_type="thread",
        )

    whole = list(loader(StreamPacker(ROWS, CAPACITY, pool_size=40)))
    first = loader(StreamPacker(ROWS, CAPACITY, pool_size=40))
    batches = iter(first)
    taken = [next(batches) for _ in range(9)]
    state = first.state_dict()
    second = loader(StreamPacker(ROWS, CAPACITY, pool_size=40))
    second.load_state_dict(state)
    assert taken + list(second) == whole


class Rewinding:
    """Numbered rows with a state, which stand at their start again once all were read, as many sources do."""

    def __init__(self, count):
        self.count, self.place = count, 0

    def __iter__(self):
        while self.place < self.count:
            self.place += 1
            yield {"input_ids": [self.place - 1] * 10}
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 6, "last"])
def test_each_rank_resumes_its_share_of_a_stateful_source(monkeypatch, rank, stop):
    monkeypatch.setattr("multipack.order.stream.Agreement.__init__", lambda self, *_: None)
    monkeypatch.setattr("multipack.order.stream.Agreement.keep_step", lambda self, batches, *_, **__: batches)

    def packer():
        return StreamPacker(Rewinding(61), 32, pool_size=5, num_replicas=3, rank=rank)

    whole = [row_ids(batch) for batch in packer()]
    assert sorted(row for batch in whole for row in batch) == list(range(rank, 61, 3))
    first = packer()
    batches = iter(first)
    for _ in range(len(whole) if stop == "last" else stop):
        next(batches)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = packer()
    second.load_state_dict(state)
    assert [row_ids(batch) for batch in second] == (whole[stop:] if stop != "last" else [])
    assert [row_ids(batch) for batch in second] == whole


@pytest.mark.parametrize("source", [lambda: Rewinding(20), lambda: ROWS[:20]])
def test_the_state_after_a_pass_is_the_start_of_the_next(source):
    packer = StreamPacker(source(), CAPACITY)
    whole = [row_ids(batch) for batch in packer]
    other = StreamPacker(source(), CAPACITY)
    other.load_state_dict(packer.state_dict())
    assert [row_ids(batch) for batch in other] == whole


def test_numbers_of_numpy_are_those_of_python():
    ours = StreamPacker(
        ROWS, np.int64(CAPACITY), seed=np.int64(-5), pool_size=np.int64(9), max_sequences_per_bin=np.int8(3)
    )
    plain = StreamPacker(ROWS, CAPACITY, seed=-5, pool_size=9, max_sequences_per_bin=3)
    assert [row_ids(batch) for batch in ours] == [row_ids(batch) for batch in plain]
    next(iter(ours))
    assert json.loads(json.dumps(ours.state_dict()))["capacity"] == CAPACITY


def test_ranks_take_every_nth_row(monkeypatch):
    # Without a process group there is no agreement, so only the split is looked at.
    monkeypatch.setattr("multipack.order.stream.Agreement", lambda *_: None)
    shares = [
        [row for batch in StreamPacker(ROWS, CAPACITY, num_replicas=3, rank=r) for row in row_ids(batch)]
        for r in range(3)
    ]
    assert [sorted(share) for share in shares] == [list(range(r, 500, 3)) for r in range(3)]
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=4)
    shares = [
        [row for batch in StreamPacker(stream, CAPACITY, num_replicas=2, rank=r) for row in row_ids(batch)]
        for r in range(2)
    ]
    assert sorted(shares[0] + shares[1]) == list(range(500))


OVERLONG = make_rows([5, 150, 3])


def test_an_overlong_row_is_an_error_by_default():
    with pytest.raises(ValueError, match="row 1 of the stream has 150 tokens, 86 above the capacity of 64"):
        list(StreamPacker(OVERLONG, CAPACITY))


@pytest.mark.parametrize(
    ("overlong", "lengths", "report"),
    [
        ("drop", [3, 5], {"overlong_sequences": 1, "lost_tokens": 150}),
        ("truncate", [3, 5, 64], {"overlong_sequences": 1, "lost_tokens": 86}),
        ("split", [3, 5, 22, 64, 64], {"overlong_sequences": 1}),
    ],
)
def test_overlong_rows_are_cut_or_counted(overlong, lengths, report):
    packer = StreamPacker(OVERLONG, CAPACITY, overlong=overlong)
    sequences = [sequence for batch in packer for sequence in batch]
    assert sorted(len(sequence["input_ids"]) for sequence in sequences) == lengths
    assert all(len(sequence["labels"]) == len(sequence["input_ids"]) for sequence in sequences)
    if overlong == "split":
        labels = sorted(label for s in sequences if s["input_ids"][0] == 1 for label in s["labels"].tolist())
        assert labels == list(range(150))
    assert vars(packer.report) == {**vars(multipack.order.stream.StreamReport()), **report}


def test_only_token_columns_are_cut():
    row = {
        "input_ids": [1, 2, 3, 4],
        "labels": np.array([5, 6, 7, 8]),
        "words": list("abcd"),
        "turns": [[1], [1, 2]],
        "text": "four",
        "score": torch.tensor(0.5),
    }
    (batch,) = StreamPacker([row], 3, overlong="truncate")
    kept = TokenDataset([row], max_length=3, overlong="truncate")[0]
    for got in (batch[0], kept):
        assert (got["input_ids"].tolist(), got["labels"].tolist()) == ([1, 2, 3], [5, 6, 7])
        assert (got["words"], got["text"]) == (list("abcd"), "four")
        assert (got["turns"], got["score"].item()) == ([[1], [1, 2]], 0.5)


@pytest.mark.parametrize("tensors", [False, True])
def test_rows_of_shape_one_by_length_have_that_length(tensors):
    # 4 rows of 30 tokens: two fit a bin of 64, and not four, as if each had one token.
    rows = [{"input_ids": [[row] * 30], "labels": [list(range(30))]} for row in range(4)]
    if tensors:
        rows = [{key: torch.tensor(value) for key, value in row.items()} for row in rows]
    batches = list(StreamPacker(rows, CAPACITY))
    assert sorted(row_ids(batch) for batch in batches) == [[0, 1], [2, 3]]
    batch = PackedCollator()(batches[0])
    assert (batch["num_tokens"], batch["num_target_tokens"]) == (60, 58)
    cut = [sequence for batch in StreamPacker(rows, 20, overlong="truncate") for sequence in batch]
    assert [sequence["labels"].tolist() for sequence in cut] == [list(range(20))] * 4


def test_empty_rows_are_left_out_and_counted():
    packer = StreamPacker([{"input_ids": []}, {"input_ids": [7]}], CAPACITY)
    assert [row_ids(batch) for batch in packer] == [[7]]
    assert packer.report.empty_sequences == 1


def test_a_stream_without_rows_is_no_success():
    packer = StreamPacker(iter(ROWS[:5]), CAPACITY)
    assert len(list(packer)) >= 1
    with pytest.raises(ValueError, match=r"gave no row.*can be read only once"):
        list(packer)


def test_set_epoch_reaches_the_source():
    class Shuffled:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([{"input_ids": [self.epoch]}])

    packer = StreamPacker(Shuffled(), CAPACITY)
    packer.set_epoch(3)
    assert [row_ids(batch) for batch in packer] == [[3]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (dict(capacity=0), ValueError, "capacity is 0"),
        (dict(pool_size=0), ValueError, "pool_size is 0"),
        (dict(bins_per_batch=0), ValueError, "bins_per_batch is 0"),
        (dict(max_sequences_per_bin=0), ValueError, "max_sequences_per_bin is 0"),
        (dict(overlong="cut"), ValueError, "overlong 'cut' is none of"),
        (dict(tail="split"), ValueError, "tail 'split' is none of"),
        (dict(source=5), TypeError, "must be an iterable of rows, not int"),
        (dict(num_replicas=2, rank=0), ValueError, "no process group"),
    ],
)
def test_bad_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        StreamPacker(**{"source": ROWS, "capacity": CAPACITY, **arguments})


def test_worker_processes_cannot_agree_with_other_ranks(monkeypatch):
    monkeypatch.setattr("multipack.order.stream.Agreement", lambda *_: object())
    packer = StreamPacker(ROWS, CAPACITY, num_replicas=3, rank=1)
    monkeypatch.setattr(
        "multipack.order.stream.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=2)
    )
    with pytest.raises(ValueError, match="2 worker processes cannot agree with 3 ranks"):
        next(iter(packer))


def test_rows_that_are_no_mappings_are_named():
    with pytest.raises(
        TypeError, match=r"row 0 of the stream has no list of tokens in column .*, only a list"
    ):
        list(StreamPacker([[1, 2]], CAPACITY))


def test_rows_without_the_column_are_named():
    with pytest.raises(
        TypeError, match=r"row 0 of the stream has no list of tokens in column 'input_ids', only \['text'\]"
    ):
        list(StreamPacker([{"text": "hello"}], CAPACITY))


def pool_state(arrivals, lengths, next_arrival=9, search_budget=0):
    return _core.StreamPoolState(
        list(range(len(arrivals))), arrivals, lengths, next_arrival, search_budget, 1
    )


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (dict(arrivals=[0, 1], lengths=[1]), "does not fit"),
        (dict(arrivals=[0], lengths=[0]), "does not fit"),
        (dict(arrivals=[0], lengths=[11]), "does not fit"),
        (dict(arrivals=[0, 1, 2, 3], lengths=[1] * 4), "does not fit"),
        (dict(arrivals=[-1], lengths=[1]), "no pool can have"),
        (dict(arrivals=[2, 1], lengths=[1, 1]), "no pool can have"),
        (dict(arrivals=[10], lengths=[1]), "no pool can have"),
        (dict(arrivals=[0], lengths=[1], next_arrival=2**63 - 1), "no pool can have"),
        (dict(arrivals=[0], lengths=[1], search_budget=-(2**63)), "no pool can have"),
        (dict(arrivals=[0], lengths=[1], search_budget=2**63 - 1), "no pool can have"),
    ],
)
def test_a_corrupt_state_of_a_pool_is_refused(state, text):
    pool = _core.StreamPool(10, 3, 10, 0)
    with pytest.raises(ValueError, match=text):
        pool.restore(pool_state(**state))
    pool.restore(pool_state([0, 1, 1], [1, 10, 3]))
    assert len(pool) == 3
    with pytest.raises(ValueError, match="does not fit"):
        pool.restore(pool_state([], []))  # it is not empty any more


@pytest.mark.parametrize(
    "sizes", [(0, 3, 1), (2**24 + 1, 3, 1), (2**31 - 1, 3, 1), (10, 0, 1), (10, 2**24 + 1, 1), (10, 3, 0)]
)
def test_impossible_pools_are_refused(sizes):
    with pytest.raises(ValueError, match="outside 1"):
        _core.StreamPool(*sizes, 0)


def test_states_of_other_streams_are_refused():
    packer = StreamPacker(ROWS, CAPACITY)
    next(iter(packer))
    with pytest.raises(ValueError, match=r"capacity \(64 in the state, 65 here\)"):
        StreamPacker(ROWS, CAPACITY + 1).load_state_dict(packer.state_dict())
    with pytest.raises(ValueError, match="not the state of a StreamPacker"):
        packer.load_state_dict({"epoch": 1})


def tokens(count):
    return {"input_ids": list(range(count))}


def rows_of_batches(packer):
    return [selection.source_rows().tolist() for selection in packer]


def test_a_row_that_is_none_is_an_error_and_no_end():
    packer = StreamPacker([tokens(3), None, tokens(2)], 8, pool_size=1)
    with pytest.raises(TypeError, match="row 1 of the stream has no list of tokens"):
        list(packer)


@pytest.mark.parametrize(
    ("rows", "text"),
    [([], "the stream gave no row"), ([tokens(0)] * 3, "none of the stream's 3 rows can be packed"),
     ([tokens(20)] * 4, "4 are above the capacity of 8")],
)  # fmt: skip
def test_an_epoch_without_a_sequence_is_an_error(rows, text):
    with pytest.raises(ValueError, match=text):
        list(StreamPacker(rows, 8, overlong="drop"))


def test_sequences_of_a_stream_know_their_row():
    # 5 + 3 and 4 + 4 fill bins of 8; row 2 is empty, row 5 is split into 8 and 1.
    rows = [tokens(n) for n in (5, 3, 0, 4, 4, 9)]
    packer = StreamPacker(rows, 8, pool_size=8, overlong="split")
    found = sorted(row for batch in rows_of_batches(packer) for row in batch)
    assert found == [0, 1, 3, 4, 5, 5]
    batch = PackedCollator(return_indices=True)(
        next(iter(StreamPacker(rows, 8, pool_size=1, overlong="split")))
    )
    assert batch["indices"].tolist() == [0]


def test_rows_that_wait_keep_their_numbers_through_a_state():
    rows = [tokens(1 + n % 5) for n in range(60)]
    whole = rows_of_batches(StreamPacker(rows, 16, pool_size=8))
    packer = StreamPacker(rows, 16, pool_size=8)
    reading = iter(packer)
    head = [next(reading).source_rows().tolist() for _ in range(4)]
    resumed = StreamPacker(rows, 16, pool_size=8)
    resumed.load_state_dict(packer.state_dict())
    assert head + rows_of_batches(resumed) == whole


class ByEpoch:
    """Row i of epoch e holds e; keeps the epochs it was told."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([{"input_ids": [self.epoch] * 4} for _ in range(6)])


def epochs_of(packer):
    return {int(token) for selection in packer for row in selection for token in row["input_ids"]}


def test_another_epoch_drops_a_loaded_place_and_the_same_keeps_it():
    def half_read():
        packer = StreamPacker(ByEpoch(), 8, pool_size=2)
        packer.set_epoch(2)
        next(iter(packer))
        return packer.state_dict()

    packer = StreamPacker(ByEpoch(), 8, pool_size=2)
    packer.load_state_dict(half_read())
    packer.set_epoch(2)
    assert len(list(packer)) == 2
    packer.load_state_dict(half_read())
    packer.set_epoch(3)
    assert len(list(packer)) == 3
    assert epochs_of(packer) == {3}


def test_an_epoch_reaches_workers_that_persist():
    loader = TorchDataLoader(
        StreamPacker(ByEpoch(), 8, pool_size=1),
        batch_size=None,
        collate_fn=PackedCollator(),
        num_workers=1,
        persistent_workers=True,
    )
    for epoch in (0, 4, 1):
        loader.dataset.set_epoch(epoch)
        assert {int(token) for batch in loader for token in batch["input_ids"].flatten()} == {epoch}


def test_an_open_pass_obeys_a_loaded_state_with_its_next_batch():
    rows = [tokens(4) for _ in range(8)]
    packer = StreamPacker(rows, 8, pool_size=2)
    reading = iter(packer)
    next(reading)
    state = packer.state_dict()
    second = next(reading).source_rows().tolist()
    packer.load_state_dict(state)
    assert next(reading).source_rows().tolist() == second
    assert len(list(reading)) == 2


def test_a_shuffle_buffer_of_hugging_face_loses_no_row():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list([{"input_ids": [n, n]} for n in range(200)]).to_iterable_dataset(4)

    def build():
        return StreamPacker(stream.shuffle(seed=3, buffer_size=50), 8, pool_size=4)

    def values(selections):
        return [int(row["input_ids"][0]) for selection in selections for row in selection]

    whole = values(build())
    assert sorted(whole) == list(range(200))
    packer = build()
    reading = iter(packer)
    head = values([next(reading) for _ in range(9)])
    resumed = build()
    resumed.load_state_dict(packer.state_dict())
    assert head + values(resumed) == whole
