"""Micro-batches for RL updates: every sequence once, equal counts on every rank, capacity kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import pack, split_micro_batches


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    capacity=st.integers(40, 100),
    ranks=st.integers(1, 7),
)
def test_each_sequence_once_in_equal_counts(lengths, capacity, ranks):
    split = split_micro_batches(lengths, capacity, num_replicas=ranks)
    assert all(len(micro_step) == ranks for micro_step in split)
    batches = [batch for micro_step in split for batch in micro_step]
    assert sorted(row for b in batches if not b.repeated for row in b) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in b) <= capacity for b in batches)
    assert sum(b.repeated for b in batches) == max(0, len(split) * ranks - len(lengths))
    fewest = -(-len(pack(lengths, capacity, method="best_fit_decreasing")) // ranks)
    assert len(split) == fewest


def tokens_of(split, lengths):
    """Tokens of every micro-batch that counts, ascending."""
    return sorted(sum(lengths[row] for row in b) for step in split for b in step if not b.repeated)


def test_bins_stay_as_packed_where_evening_out_would_overfill_one():
    # Longest first to the emptiest of three bins would end at 5 + 3 + 3 = 11; packed, all three are full.
    lengths = [5, 5, 4, 4, 3, 3, 3]
    split = split_micro_batches(lengths, 9, num_replicas=1)
    assert tokens_of(split, lengths) == [9, 9, 9]


def test_bins_as_full_as_the_capacity_are_evened_out():
    # Best-fit decreasing makes 6, 5 + 1 and 1 + 1 + 1.
    lengths = [6, 5, 1, 1, 1, 1]
    assert tokens_of(split_micro_batches(lengths, 6, num_replicas=3), lengths) == [4, 5, 6]


def test_a_bin_of_several_sequences_is_halved_for_a_rank_that_has_none():
    # 8 bins for 3 ranks. Nine bins by longest first would overfill one, and of the fullest bins one is a single sequence.
    lengths = [25, 12, 12, 10, 9, 7, 10, 7, 9, 12, 10, 8, 11, 9, 8, 9, 10, 7]
    split = split_micro_batches(lengths, 25, num_replicas=3)
    assert [len(micro_step) for micro_step in split] == [3, 3, 3]
    batches = [batch for micro_step in split for batch in micro_step]
    assert sorted(row for batch in batches for row in batch) == list(range(18))
    # Packed they hold 20, 20, 23, 23, 24, 25, 25, 25: the first 25 of several sequences, 9 + 9 + 7, becomes 9 + 7 and 9.
    assert tokens_of(split, lengths) == [9, 16, 20, 20, 23, 23, 24, 25, 25]


@pytest.mark.parametrize(
    ("hidden_size", "beside_the_longest"), [(1, [[0]]), (4096, [[2, 3], [2, 4], [3, 4]])]
)
def test_attention_counts_in_the_cost_that_ranks_are_dealt_by(hidden_size, beside_the_longest):
    # Tokens: 10, 11, 6 + 6 and 6 + 5. Tokens + squares / 12: 18.3, 21.1, 18.0 and 16.1.
    split = split_micro_batches([10, 11, 6, 6, 6, 5], 12, num_replicas=2, hidden_size=hidden_size)
    (others,) = [sorted(b) for step in split if any(1 in b for b in step) for b in step if 1 not in b]
    assert others in beside_the_longest


def test_ranks_get_even_work():
    lengths = np.random.default_rng(0).integers(16, 400, 500)
    split = split_micro_batches(lengths, 2048, num_replicas=8)
    tokens = np.array([[lengths[list(batch)].sum() for batch in micro_step] for micro_step in split])
    assert tokens.max() / tokens.mean() < 1.05


@pytest.mark.parametrize(
    ("lengths", "ranks", "text"),
    [
        ([], 2, "0 sequences cannot be split over 2 ranks"),
        ([9], 1, "row 0 has 9 tokens, above the capacity of 8"),
        ([1], 0, "0 ranks"),
    ],
)
def test_bad_input_is_named(lengths, ranks, text):
    with pytest.raises(ValueError, match=text):
        split_micro_batches(lengths, 8, num_replicas=ranks)
