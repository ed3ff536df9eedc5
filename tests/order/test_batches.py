"""Global batches by number: only what is asked for is planned or kept."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from torch.utils.data import BatchSampler

from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler
from multipack.order import batches
from multipack.order.batches import ListedBatches, PlanBatches


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
    listed = PlanBatches(plan, 2, False)
    assert [listed.batch(i).bins for i in range(3)] == [[[0, 1], [2]], [[3], [4, 5]], [[6]]]
    squares = np.array([36 + 4 + 49, 64 + 25 + 1, 16])
    assert listed.costs(0, 3, 10).tolist() == pytest.approx(np.array([15, 14, 4]) + squares / 120)
    assert listed.costs(1, 2, 10).tolist() == pytest.approx(np.array([14, 4]) + squares[1:] / 120)
    assert (len(listed), len(PlanBatches(plan, 2, True))) == (3, 2)


@pytest.mark.parametrize(("start", "most", "found"), [(0, 4, 4), (0, 9, 6), (3, 2, 2), (5, 4, 1), (6, 4, 0)])
def test_listed_batches_are_counted_from_anywhere(start, most, found):
    listed = ListedBatches(iter([[i] for i in range(6)]))
    assert listed.count(start, most) == found
    assert [listed.batch(start + i) for i in range(found)] == [[start + i] for i in range(found)]
    # Whatever was skipped, what is repeated is the beginning of the epoch.
    assert [listed.early(i) for i in range(min(start, 2))] == [[i] for i in range(min(start, 2))]


def test_listed_batches_go_on_in_steps_of_any_size():
    listed = ListedBatches(iter([[i] for i in range(20)]))
    for start, most in ((0, 5), (2, 1), (2, 3), (4, 4), (12, 2)):
        assert listed.count(start, most) == most
        assert [listed.batch(start + i) for i in range(most)] == [[start + i] for i in range(most)]


def test_ranks_beyond_the_batches_kept_repeat_those_again(monkeypatch):
    monkeypatch.setattr(batches, "MOST_REPEATS", 2)
    three = BatchSampler(range(3), 1, drop_last=False)
    ranks = [list(DistributedBatchSampler(three, num_replicas=8, rank=r, tail="pad")) for r in range(8)]
    assert ranks == [[[0]], [[1]], [[2]], [[0]], [[1]], [[0]], [[1]], [[0]]]
    assert [rank[0].repeated for rank in ranks] == [False] * 3 + [True] * 5
