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
    assert sorted(row for b in batches if not b.repeated for row in b.rows.tolist()) == list(
        range(len(lengths))
    )
    assert all(0 < sum(lengths[row] for row in b.rows) <= capacity for b in batches)
    assert sum(b.repeated for b in batches) == max(0, len(split) * ranks - len(lengths))
    fewest = -(-len(pack(lengths, capacity, method="best_fit_decreasing")) // ranks)
    assert len(split) == fewest


def test_ranks_get_even_work():
    lengths = np.random.default_rng(0).integers(16, 400, 500)
    split = split_micro_batches(lengths, 2048, num_replicas=8)
    tokens = np.array([[lengths[batch.rows].sum() for batch in micro_step] for micro_step in split])
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
