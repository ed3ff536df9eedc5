"""Micro-batches for RL updates: every sequence once, equal counts on every rank, capacity kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import pack, split_micro_batches
from multipack.order.packing import lower_bound


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
    assert len(split) <= -(-len(pack(lengths, capacity, method="best_fit_decreasing")) // ranks)
    assert len(split) >= -(-lower_bound(lengths, capacity) // ranks)


def tokens_of(split, lengths):
    """Tokens of every micro-batch that counts, ascending."""
    return sorted(sum(lengths[row] for row in b) for step in split for b in step if not b.repeated)


def test_a_search_spares_a_micro_step():
    # Best-fit decreasing puts 10 with 6 and needs a third bin; 10 + 5 + 5 and 6 + 6 + 5 are two.
    split = split_micro_batches([5, 5, 5, 6, 6, 10], 20, num_replicas=1)
    assert len(split) == 2
    assert len(pack([5, 5, 5, 6, 6, 10], 20, method="best_fit_decreasing")) == 3


@pytest.mark.report("verl-project/verl#7553", "verl-project/verl#6735")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_cap_holds_where_two_sequences_do_not_fit(ranks):
    split = split_micro_batches([7] * 8, 8, num_replicas=ranks)
    assert [len(micro_step) for micro_step in split] == [ranks] * (
        8 // ranks
    )  # 7 micro-batches would overflow
    assert tokens_of(split, [7] * 8) == [7] * 8


@pytest.mark.report("radixark/miles#2197", "THUDM/slime#1860")
@pytest.mark.parametrize(
    ("multiple_of", "micro_steps", "repeats"), [(1, 2, 0), (2, 2, 0), (3, 3, 1), (4, 4, 3)]
)
def test_every_rank_has_a_sequence_in_every_micro_step(multiple_of, micro_steps, repeats):
    # 5 samples of which 2 fit a micro-batch, on 2 ranks: 3 bins become 4, 2 a rank.
    split = split_micro_batches([4] * 5, 8, num_replicas=2, multiple_of=multiple_of)
    assert [len(micro_step) for micro_step in split] == [2] * micro_steps
    batches = [batch for micro_step in split for batch in micro_step]
    assert sorted(row for b in batches if not b.repeated for row in b) == [0, 1, 2, 3, 4]
    assert sum(b.repeated for b in batches) == repeats
    assert all(1 <= len(b) <= 2 for b in batches)


@pytest.mark.report("verl-project/verl#5438", "google/tunix#820")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_answers_to_one_prompt_share_a_micro_batch(ranks):
    # 4 prompts of 4 answers of 5 tokens in turns; 30 tokens hold one and a half prompts, or six answers.
    uid = np.array(["p", "q", "r", "s"] * 4)
    split = split_micro_batches([5] * 16, 30, num_replicas=ranks, groups=uid)
    batches = [batch for micro_step in split for batch in micro_step]
    assert [len(micro_step) for micro_step in split] == [ranks] * (4 // ranks)
    assert sorted(sorted(b) for b in batches) == [[i, i + 4, i + 8, i + 12] for i in range(4)]


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=40),
    spare=st.integers(0, 40),
    ranks=st.integers(1, 5),
    multiple_of=st.integers(1, 4),
)
def test_no_group_is_split_and_micro_steps_are_a_multiple(rows, spare, ranks, multiple_of):
    lengths, keys = [length for length, _ in rows], [key for _, key in rows]
    capacity = max(sum(length for length, k in rows if k == key) for key in keys) + spare
    split = split_micro_batches(lengths, capacity, num_replicas=ranks, groups=keys, multiple_of=multiple_of)
    assert len(split) % multiple_of == 0
    assert all(len(micro_step) == ranks for micro_step in split)
    batches = [batch for micro_step in split for batch in micro_step]
    counting = [b for b in batches if not b.repeated]
    assert sorted(row for b in counting for row in b) == list(range(len(rows)))
    assert all(0 < sum(lengths[row] for row in b) <= capacity for b in batches)
    homes = [{keys[row] for row in b} for b in counting]
    assert sum(map(len, homes)) == len(set(keys))


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
    # 8 bins for 3 ranks. Nine bins by longest first would overfill one, and of the fullest bins one is a
    # single sequence.
    lengths = [25, 12, 12, 10, 9, 7, 10, 7, 9, 12, 10, 8, 11, 9, 8, 9, 10, 7]
    split = split_micro_batches(lengths, 25, num_replicas=3)
    assert [len(micro_step) for micro_step in split] == [3, 3, 3]
    batches = [batch for micro_step in split for batch in micro_step]
    assert sorted(row for batch in batches for row in batch) == list(range(18))
    # Packed they hold 20, 20, 23, 23, 24, 25, 25, 25: the first 25 of several sequences, 9 + 9 + 7, becomes 9
    # + 7 and 9.
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


def test_bad_groups_and_multiples_are_named():
    with pytest.raises(ValueError, match=r"group b has 17 tokens in 3 rows .* above the capacity of 16"):
        split_micro_batches([2, 6, 6, 5], 16, num_replicas=1, groups=["a", "b", "b", "b"])
    with pytest.raises(ValueError, match="together has 1 keys for 2 rows"):
        split_micro_batches([2, 6], 16, num_replicas=1, groups=[0])
    with pytest.raises(ValueError, match="multiple_of is 0, below 1"):
        split_micro_batches([2, 6], 16, num_replicas=1, multiple_of=0)
