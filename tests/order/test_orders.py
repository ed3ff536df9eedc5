"""Global batches by number: only what is asked for is planned or kept."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler
from multipack.order import listed
from multipack.order.listed import ListedOrder
from multipack.order.orders import BinOrder, RowOrder, count_batches


def test_first_batches_need_no_plan_of_the_whole_epoch(monkeypatch):
    def never(plan):
        raise AssertionError("the whole epoch was planned")

    monkeypatch.setattr(EpochPlan, "__len__", never)
    sampler = MultipackBatchSampler([1] * 1000, 10, window=2, bins_per_batch=2)
    dealt = DistributedBatchSampler(sampler, num_replicas=2, rank=1, accumulate=2)
    assert len(list(islice(dealt, 3))) == 3
    assert dealt.state_dict()["batches"] == 6
    assert len(list(islice(sampler, 3))) == 3


def test_the_cost_of_a_batch_is_that_of_its_bins():
    # In order and next-fit: bins of 6 + 2, 7, 8, 5 + 1 tokens, two a batch, and one of 4 that is left over.
    plan = EpochPlan([6, 2, 7, 8, 5, 1, 4], 8, shuffle=False, method="next_fit")
    in_twos = BinOrder(plan, 2)
    assert [in_twos.batch(i).bins for i in range(3)] == [[[0, 1], [2]], [[3], [4, 5]], [[6]]]
    squares = np.array([36 + 4 + 49, 64 + 25 + 1, 16])
    assert in_twos.costs(0, 3, 10).tolist() == pytest.approx(np.array([15, 14, 4]) + squares / 120)
    assert in_twos.costs(1, 3, 10).tolist() == pytest.approx(np.array([14, 4]) + squares[1:] / 120)
    assert (len(in_twos), len(BinOrder(plan, 2, True))) == (3, 2)


class Ones:
    """A foreign batch sampler: six batches of one row."""

    def __len__(self):
        return 6

    def __iter__(self):
        return iter([[i] for i in range(6)])


@pytest.mark.parametrize(("start", "most", "found"), [(0, 4, 4), (0, 9, 6), (3, 2, 2), (5, 4, 1), (6, 4, 0)])
def test_listed_batches_are_counted_from_anywhere(start, most, found):
    order = ListedOrder(Ones())
    assert count_batches(order, start, most) == found
    assert [order.batch(start + i) for i in range(found)] == [[start + i] for i in range(found)]
    # Whatever was skipped, what is repeated is the beginning of the epoch.
    assert [order.early(i) for i in range(min(start, 2))] == [[i] for i in range(min(start, 2))]


def test_a_batch_of_rows_is_that_of_torchs_samplers():
    for epoch in (0, 3):
        rows = DistributedSampler(range(23), num_replicas=1, rank=0, seed=5)
        rows.set_epoch(epoch)
        order = RowOrder(23, 4, seed=5).at(epoch)
        assert [order.batch(i) for i in range(len(order))] == list(BatchSampler(rows, 4, drop_last=False))
    in_order = RowOrder(10, 4, shuffle=False)
    assert [in_order.batch(i) for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_position_among_unpacked_rows_that_torchs_samplers_saved_is_resumed():
    rows = DistributedSampler(range(23), num_replicas=1, rank=0, seed=5)
    before = DistributedBatchSampler(BatchSampler(rows, 4, False), num_replicas=2, rank=1)
    after = DistributedBatchSampler(RowOrder(23, 4, seed=5), num_replicas=2, rank=1)
    list(before)
    expected = list(before.read())
    list(islice(before, 1))
    after.load_state_dict(before.state_dict())
    assert list(after) == expected[1:]


def test_ranks_beyond_the_batches_kept_repeat_those_again(monkeypatch):
    monkeypatch.setattr(listed, "MOST_REPEATS", 2)
    three = BatchSampler(range(3), 1, drop_last=False)
    ranks = [list(DistributedBatchSampler(three, num_replicas=8, rank=r, tail="pad")) for r in range(8)]
    assert ranks == [[[0]], [[1]], [[2]], [[0]], [[1]], [[0]], [[1]], [[0]]]
    assert [rank[0].repeated for rank in ranks] == [False] * 3 + [True] * 5
