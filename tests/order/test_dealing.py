"""Batches that do not fill a last micro-step, and the marked list that carries a batch."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.batch import BatchIndices, LeftOut
from multipack.order.dealing import redeal


def test_a_batch_is_a_list_that_remembers_its_bins():
    batch = BatchIndices.of_bins([[4, 2], [7]])
    assert batch == [4, 2, 7]
    assert batch.bins == [[4, 2], [7]]
    assert batch.num_bins == 2
    repeat = batch.as_repeat()
    for same in (pickle.loads(pickle.dumps(repeat)), copy.deepcopy(repeat)):
        assert same == [4, 2, 7]
        assert same.bin_offsets == (0, 2, 3)
        assert same.repeated


def test_every_rank_gets_one_of_four_sequences():
    dealt = redeal([BatchIndices([8, 9, 10, 11])], 4, lambda row: 5)
    assert sorted(map(tuple, dealt)) == [(8,), (9,), (10,), (11,)]


def test_halves_weigh_the_same():
    dealt = redeal([BatchIndices([0, 1, 2])], 2, lambda row: [10, 6, 4][row])
    assert sorted(map(sorted, dealt)) == [[0], [1, 2]]


def test_whole_bins_are_kept_together():
    dealt = redeal([BatchIndices.of_bins([[0, 1], [2, 3]])], 2, lambda row: 1)
    assert sorted(map(sorted, dealt)) == [[0, 1], [2, 3]]


def test_with_fewer_sequences_than_ranks_the_rest_repeats():
    dealt = redeal([BatchIndices([3]), BatchIndices([5])], 5, lambda row: 1)
    assert [list(batch) for batch in dealt] == [[3], [5], [3], [5], [3]]
    assert [batch.repeated for batch in dealt] == [False, False, True, True, True]


@pytest.mark.report("huggingface/trl#1274")
def test_groups_stay_whole_and_ranks_without_one_repeat():
    # Two bins of pairs, of 5 tokens a row: the fuller one is cut between its pairs, and nothing is left for a
    # fourth rank.
    batch = BatchIndices.of_bins([[0, 1, 2, 3], [4, 5]])
    batch.groups = (7, 7, 8, 8, 9, 9)
    dealt = redeal([batch], 4, lambda row: 5)
    assert sorted(part for part in map(tuple, dealt) if part) == [(0, 1), (0, 1), (2, 3), (4, 5)]
    assert [part.groups for part in dealt] == [(7 + part[0] // 2,) * 2 for part in dealt]
    assert [part.repeated for part in dealt] == [False, False, False, True]


@given(
    st.integers(2, 7).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=ranks - 1),
        )
    )
)
def test_nothing_is_lost_and_parts_stay_inside_their_batch(case):
    ranks, lengths_of_batches = case
    lengths = [length for batch in lengths_of_batches for length in batch]
    batches, first = [], 0
    for batch in lengths_of_batches:
        batches.append(BatchIndices(range(first, first + len(batch))))
        first += len(batch)
    dealt = redeal(batches, ranks, lengths.__getitem__)
    assert len(dealt) == ranks
    assert all(dealt)
    kept = [row for batch in dealt if not batch.repeated for row in batch]
    assert sorted(kept) == list(range(len(lengths)))
    assert all(any(set(part) <= set(batch) for batch in batches) for part in dealt)
    assert any(part.repeated for part in dealt) == (len(lengths) < ranks)


def test_what_an_epoch_leaves_out_is_counted_everywhere(caplog):
    # 5 bins of one row of 3 tokens on 2 ranks: one is left over; bins_per_batch=2 leaves another one.
    packing = MultipackBatchSampler([3] * 5, 3)
    ranks = [DistributedBatchSampler(packing, num_replicas=2, rank=r, tail="drop") for r in range(2)]
    last = [list(sampler)[-1] for sampler in ranks]
    assert [batch.left_out for batch in last] == [LeftOut(1, 3)] * 2
    assert [sampler.left_out for sampler in ranks] == [LeftOut(1, 3)] * 2
    assert caplog.text.count("epoch 0 leaves out 1 sequences of 3 tokens") == 1  # by rank 0
    in_twos = MultipackBatchSampler([3] * 5, 3, bins_per_batch=2, drop_last=True)
    assert in_twos.left_out == LeftOut(1, 3)
    assert list(in_twos)[-1].left_out == LeftOut(1, 3)
    kept = DistributedBatchSampler(packing, num_replicas=2, rank=0)
    assert kept.left_out == list(kept)[-1].left_out == LeftOut()


@pytest.mark.parametrize("balance", ["micro_step", "step"])
def test_balanced_steps_leave_out_what_they_do_not_deal(balance):
    lengths = [9, 8, 7, 6, 5]
    ranks = [
        DistributedBatchSampler(
            MultipackBatchSampler(lengths, 9),
            num_replicas=2,
            rank=r,
            tail="drop",
            accumulate=2,
            balance=balance,
        )
        for r in range(2)
    ]
    dealt = [row for sampler in ranks for batch in sampler.read() for row in batch]
    tokens = sum(lengths) - sum(lengths[row] for row in dealt)
    assert ranks[0].left_out == LeftOut(5 - len(dealt), tokens)
