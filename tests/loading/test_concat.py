"""Concat-and-chunk from documents to batches: boundaries, targets, end tokens, and resuming inside a
document."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import (
    DistributedBatchSampler,
    MultipackBatchSampler,
    PackedCollator,
    TokenDataset,
    packed_dataloader,
)
from multipack.data.part import Part
from multipack.data.token_files import token_file

# huggingface/trl#1850: documents of 6 and 3 tokens, capacity 4.
DOCUMENTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]


def batches(documents=DOCUMENTS, capacity=4, **options):
    options = dict(method="concat", shuffle=False, num_workers=0, rank=0, num_replicas=1) | options
    loader = packed_dataloader(documents, capacity, **options)
    found = list(loader)
    assert len(found) == len(loader)
    return found


def of(found, name):
    return [batch[name].flatten().tolist() for batch in found]


def test_bins_of_four_four_and_one_token():
    found = batches()
    assert of(found, "input_ids") == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert of(found, "cu_seq_lens_q") == [[0, 4], [0, 2, 4], [0, 1]]
    assert of(found, "position_ids") == [[0, 1, 2, 3], [0, 1, 0, 1], [0]]
    # A fragment's first label is masked, so that "document" has 3 + 2 + 0 targets.
    assert of(found, "labels") == [[-100, 2, 3, 4], [-100, 6, -100, 8], [-100]]
    assert [batch["num_target_tokens"] for batch in found] == [3, 2, 0]
    assert [batch["num_tokens"] for batch in found] == [4, 4, 1]


def test_attention_over_the_whole_bin():
    found = batches(boundaries="bin")
    assert of(found, "input_ids") == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert of(found, "cu_seq_lens_q") == [[0, 4], [0, 4], [0, 1]]
    assert of(found, "position_ids") == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]
    assert of(found, "labels") == [[-100, 2, 3, 4], [-100, 6, 7, 8], [-100]]
    assert [batch["num_target_tokens"] for batch in found] == [3, 3, 0]
    assert [batch["max_length_q"] for batch in found] == [4, 4, 1]


@pytest.mark.parametrize(
    ("options", "boundaries", "labels"),
    [
        (dict(pad_to="capacity"), [0, 4, 8, 9, 12], [-100, 2, 3, 4, -100, 6, 7, 8, -100, -100, -100, -100]),
        (dict(layout="rows"), [0, 4, 8, 9, 12], [-100, 2, 3, 4, -100, 6, 7, 8, -100, -100, -100, -100]),
        (dict(), [0, 4, 8, 9], [-100, 2, 3, 4, -100, 6, 7, 8, -100]),
    ],
)
def test_several_bins_in_a_batch(options, boundaries, labels):
    (batch,) = batches(boundaries="bin", bins_per_batch=3, **options)
    assert batch["cu_seq_lens_q"].tolist() == boundaries
    assert batch["labels"].flatten().tolist() == labels
    assert batch["num_target_tokens"] == 6


def test_bins_as_sequences_also_without_cutting():
    # Packing by best fit, attention over the bin: [1, 2] and [3] in one bin.
    collate = PackedCollator(boundaries="bin")
    dataset = TokenDataset([[1, 2], [3]])
    batch = collate(dataset.__getitems__([0, 1]))
    assert batch["cu_seq_lens_q"].tolist() == [0, 3]
    assert batch["labels"].tolist() == [[-100, 2, 3]]
    assert batch["num_target_tokens"] == 2


def test_an_end_token_behind_each_document():
    found = batches(end_token=99)
    assert of(found, "input_ids") == [[1, 2, 3, 4], [5, 6, 99, 7], [8, 9, 99]]
    assert of(found, "labels") == [[-100, 2, 3, 4], [-100, 6, 99, -100], [-100, 9, 99]]
    assert [batch["num_target_tokens"] for batch in found] == [3, 2, 2]
    # Cut in front of the end token: alone it is predicted by nothing of its own document, but by the bin
    # before it.
    alone = batches([[1, 2, 3, 4], [5]], end_token=99)
    assert of(alone, "input_ids") == [[1, 2, 3, 4], [99, 5, 99]]
    assert of(alone, "labels") == [[-100, 2, 3, 4], [-100, -100, 99]]
    assert [batch["num_target_tokens"] for batch in alone] == [3, 1]
    whole = batches([[1, 2, 3, 4], [5]], end_token=99, boundaries="bin")
    assert of(whole, "labels") == [[-100, 2, 3, 4], [-100, 5, 99]]
    assert [batch["num_target_tokens"] for batch in whole] == [3, 2]


def test_an_end_token_with_any_method_and_with_other_columns():
    rows = {"input_ids": [[1, 2], [3]], "labels": [[-100, 2], [3]], "weights": [[0.5, 1.0], [2.0]]}
    dataset = TokenDataset(rows, end_token=7)
    assert dataset.lengths.tolist() == [3, 2]
    assert dataset.report.num_tokens == 5
    assert {name: value.tolist() for name, value in dataset[0].items()} == {
        "input_ids": [1, 2, 7],
        "labels": [-100, 2, 7],
        "weights": [0.5, 1.0, 0.0],
    }
    batch = PackedCollator()(dataset.__getitems__([0, 1]))
    assert batch["input_ids"].tolist() == [[1, 2, 7, 3, 7]]
    assert batch["labels"].tolist() == [[-100, 2, 7, -100, 7]]
    assert batch["weights"].tolist() == [[0.5, 1.0, 0.0, 2.0, 0.0]]
    assert batch["num_target_tokens"] == 3
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    # A mask says which tokens are targets, and nothing of the end.
    masked = TokenDataset({"input_ids": [[1, 2]], "loss_mask": [[1, 1]]}, end_token=7)
    assert PackedCollator()(masked.__getitems__([0]))["labels"].tolist() == [[-100, 2, -100]]
    # Truncated rows have lost their end; of split rows the last fragment has it.
    cut = TokenDataset([[1, 2, 3], [4, 5]], end_token=7, max_length=3, overlong="truncate")
    assert [cut[i]["input_ids"].tolist() for i in range(2)] == [[1, 2, 3], [4, 5, 7]]
    split = TokenDataset([[1, 2, 3], [4]], end_token=7, max_length=3, overlong="split")
    assert [split[i]["input_ids"].tolist() for i in range(3)] == [[1, 2, 3], [7], [4, 7]]
    assert pickle.loads(pickle.dumps(dataset))[1]["input_ids"].tolist() == [3, 7]


def test_rows_one_by_one_are_the_same_parts():
    dataset = TokenDataset(DOCUMENTS)
    ids = [Part(0, 4, 2), Part(1, 0, 2)]
    selection = dataset.__getitems__(ids)
    assert [row["input_ids"].tolist() for row in selection] == [[5, 6], [7, 8]]
    assert [row["input_ids"].tolist() for row in selection[::-1]] == [[7, 8], [5, 6]]
    assert selection[-1]["input_ids"].tolist() == [7, 8]
    again = pickle.loads(pickle.dumps(ids))
    assert [(int(part), part.start, part.length) for part in again] == [(0, 4, 2), (1, 0, 2)]
    assert copy.deepcopy(ids) == [0, 1]


def tokens_of(ids):
    return [(int(part), part.start + i) for part in ids for i in range(part.length)]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    capacity=st.integers(2, 16),
    ranks=st.sampled_from([(4, 2), (2, 4), (1, 3), (3, 1)]),
    taken=st.integers(0, 12),
    seed=st.integers(0, 9),
)
def test_resumed_on_other_ranks_each_token_comes_once(lengths, capacity, ranks, taken, seed):
    def samplers(count):
        order = lambda: MultipackBatchSampler(lengths, capacity, method="concat", seed=seed)  # one a rank
        return [DistributedBatchSampler(order(), num_replicas=count, rank=rank) for rank in range(count)]

    first = samplers(ranks[0])
    assert len({len(sampler) for sampler in first}) == 1
    found = Counter()
    steps = min(taken, len(first[0]) - 1)
    for sampler in first:
        passing = iter(sampler)
        for _ in range(steps):
            batch = next(passing)
            if not batch.repeated:
                found.update(tokens_of(batch))
    state = json.loads(json.dumps(first[0].state_dict()))
    for sampler in samplers(ranks[1]):
        sampler.load_state_dict(state)
        for batch in sampler:
            if not batch.repeated:
                found.update(tokens_of(batch))
    assert found == Counter((row, i) for row, length in enumerate(lengths) for i in range(length))


def test_another_cut_is_another_order():
    state = MultipackBatchSampler([6, 3], 4, method="concat").state_dict()
    with pytest.raises(ValueError, match="capacity"):
        MultipackBatchSampler([6, 3], 5, method="concat").load_state_dict(state)
    with pytest.raises(ValueError, match="method"):
        MultipackBatchSampler([4, 3], 4).load_state_dict(state)


def test_two_epochs_of_a_token_file_on_two_ranks(tmp_path):
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 50, 20_000).astype(np.uint16)
    stored.tofile(tmp_path / "train.bin")
    loaders = [
        packed_dataloader(
            token_file(tmp_path / "train.bin", np.uint16, end=7),
            128,
            method="concat",
            bins_per_batch=4,
            rank=rank,
            num_replicas=2,
        )
        for rank in range(2)
    ]
    orders = []
    for _ in range(2):
        found = [batch["input_ids"].flatten() for loader in loaders for batch in loader]
        flat = np.concatenate(found)
        assert np.array_equal(np.bincount(flat, minlength=50), np.bincount(stored, minlength=50))
        orders.append(flat)
    assert not np.array_equal(*orders)


def test_bad_combinations_are_named():
    with pytest.raises(ValueError, match="max_sequences_per_bin does not go with method='concat'"):
        MultipackBatchSampler([3], 4, method="concat", max_sequences_per_bin=3)
    with pytest.raises(ValueError, match="boundaries 'row' is none of"):
        PackedCollator(boundaries="row")
    with pytest.raises(ValueError, match="align_to=4 leaves slots between"):
        PackedCollator(boundaries="bin", align_to=4)
    with pytest.raises(ValueError, match="end_token is -1, below 0"):
        TokenDataset([[1]], end_token=-1)
