"""Dealing by cost: the same sequences a step, equal counts, smaller gaps between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack.order.balance import batch_cost, deal, loss_of_balance


def test_cost_counts_attention_against_matrices():
    # One sequence of 12 * 4096 tokens costs as much in attention as in matrices.
    assert batch_cost([49152], [49152**2]).tolist() == [2 * 49152]
    assert batch_cost([10], [100], hidden_size=100).tolist() == [10 + 100 / 1200]


@given(
    costs=st.lists(st.floats(1, 100), max_size=60),
    ranks=st.integers(1, 5),
    mode=st.sampled_from(["none", "micro_step", "step"]),
    accumulate=st.none() | st.integers(1, 4),
    window=st.integers(1, 3),
)
def test_batches_are_dealt_once_and_evenly(costs, ranks, mode, accumulate, window):
    dealt = deal(costs, ranks, mode, accumulate=accumulate, window=window)
    assert dealt.shape == (len(costs) // ranks, ranks)
    assert len(set(dealt.ravel().tolist())) == dealt.size
    assert set(dealt.ravel().tolist()) <= set(range(len(costs)))
    if mode != "none" and window == 1 and accumulate is not None:
        # An optimizer step holds the batches it would have held anyway.
        for step in range(len(costs) // (accumulate * ranks)):
            inside = dealt[step * accumulate : (step + 1) * accumulate].ravel()
            assert set(inside.tolist()) == set(
                range(step * accumulate * ranks, (step + 1) * accumulate * ranks)
            )


def test_sorted_gives_neighbours_to_a_micro_step():
    dealt = deal([5, 1, 4, 2, 6, 3], 2, "micro_step")
    costs = np.array([5, 1, 4, 2, 6, 3])[dealt]
    assert sorted(map(sorted, costs.tolist())) == [[1, 2], [3, 4], [5, 6]]
    assert costs.sum(axis=0).tolist() == [6 + 3 + 2, 5 + 4 + 1]  # backwards every other time


def test_lpt_gives_equal_sums():
    dealt = deal([9, 7, 6, 6, 5, 3], 3, "step")
    costs = np.array([9, 7, 6, 6, 5, 3])[dealt]
    assert costs.sum(axis=0).tolist() == [12, 12, 12]


def test_what_does_not_fill_a_micro_step_is_the_cheapest():
    assert set(range(5)) - set(deal([3, 9, 1, 8, 7], 2, "micro_step").ravel().tolist()) == {2}
    assert deal([3, 9, 1, 8, 7], 2, "none").tolist() == [[0, 1], [2, 3]]


def heavy_tail_costs(num_batches):
    """Costs of one sequence a bin of 32k tokens: a heavy tail of squares."""
    rng = np.random.default_rng(0)
    longest = np.clip(rng.lognormal(8.5, 1.0, num_batches), 100, 32768)
    return batch_cost(np.full(num_batches, 32768), longest**2)


def test_modes_bring_the_ranks_together():
    costs = heavy_tail_costs(64 * 16)
    in_turn = loss_of_balance(costs, deal(costs, 64, "none"), meet_every_micro_step=True)
    by_rank = loss_of_balance(costs, deal(costs, 64, "micro_step"), meet_every_micro_step=True)
    lpt = loss_of_balance(costs, deal(costs, 64, "step"), meet_every_micro_step=False)
    assert in_turn > 1.2
    assert by_rank < 1.02
    assert lpt < 1.001


def test_a_window_spreads_costs_over_its_steps():
    costs = heavy_tail_costs(8 * 4 * 16)
    dealt = deal(costs, 8, "micro_step", accumulate=4, window=16)
    assert loss_of_balance(costs, dealt, meet_every_micro_step=True) < 1.01
    steps = costs[dealt].reshape(16, -1).sum(axis=1)
    plain = costs[deal(costs, 8, "none")].reshape(16, -1).sum(axis=1)
    # Dealing across steps makes them less alike; this is the factor measured for a good order of strata.
    assert steps.std() < 1.92 * plain.std()


def test_a_window_takes_one_of_each_stratum_in_a_low_discrepancy_order():
    # Strata 8 7 6 5 and 4 3 2 1; places 0 2 1 3 of the first, backwards in the second: every step costs 9.
    assert deal([8, 7, 6, 5, 4, 3, 2, 1], 1, "micro_step", accumulate=2, window=4).ravel().tolist() == [
        *(0, 7),
        *(2, 5),
        *(1, 6),
        *(3, 4),
    ]
    # Three places of a stratum are those of four, 0 2 1 3, without the fourth; a step of fewer than a window
    # is not spread.
    assert deal([3, 2, 1], 1, "micro_step", accumulate=1, window=3).ravel().tolist() == [0, 2, 1]
    assert deal([3, 2, 1], 1, "micro_step", accumulate=1, window=4).ravel().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(mode="best"), "'best' is none of none, micro_step, step"),
        (dict(num_replicas=0), "num_replicas=0"),
        (dict(window=0), "window=0"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        deal(**{"costs": [1.0, 2.0], "num_replicas": 1, "mode": "none", **arguments})
