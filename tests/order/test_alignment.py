"""Bins of aligned sequences: planned by the slots that the collator lays out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import EpochPlan


def aligned(length: int, align_to: int) -> int:
    return next(slots for slots in range(length, length + align_to) if slots % align_to == 0)


def test_two_sequences_that_fit_only_without_alignment():
    # 5 and 3 tokens fill 8 slots, but take 8 + 4.
    plan = EpochPlan([5, 3], 8, align_to=4)
    assert sorted(rows.tolist() for rows in plan.bins(0, 9)) == [[0], [1]]
    assert sorted(plan.costs(0, 9)[0].tolist()) == [4, 8]
    assert (plan.num_tokens, plan.num_slots, plan.min_bins, plan.efficiency) == (8, 12, 2, 0.5)
    assert len(EpochPlan([5, 3], 8)) == 1


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=150),
    align_to=st.integers(1, 9),
    capacity=st.integers(6, 9),
    method=st.sampled_from(["auto", "stream", "best_fit_decreasing", "next_fit"]),
    max_sequences_per_bin=st.none() | st.integers(1, 4),
    window=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int64]),
)
def test_bins_hold_the_slots_of_their_sequences(
    lengths, align_to, capacity, method, max_sequences_per_bin, window, shuffle, dtype
):
    capacity *= 9 * align_to
    plan = EpochPlan(
        np.array(lengths, dtype),
        capacity,
        align_to=align_to,
        method=method,
        max_sequences_per_bin=max_sequences_per_bin,
        window=window,
        shuffle=shuffle,
    )
    bins = plan.bins(0, len(plan))
    assert sorted(int(row) for rows in bins for row in rows) == list(range(len(lengths)))
    slots = [[aligned(lengths[row], align_to) for row in rows] for rows in bins]
    assert all(sum(of_bin) <= capacity for of_bin in slots)
    tokens, squares = plan.costs(0, len(plan))
    assert tokens.tolist() == [sum(of_bin) for of_bin in slots]
    assert squares.tolist() == [sum(n * n for n in of_bin) for of_bin in slots]
    assert plan.num_slots == sum(map(sum, slots))
    assert plan.efficiency == pytest.approx(sum(lengths) / (len(bins) * capacity))


def test_without_alignment_a_plan_is_as_before():
    lengths = np.random.default_rng(0).integers(1, 1000, 3000)
    plain, one = EpochPlan(lengths, 2048), EpochPlan(lengths, 2048, align_to=1)
    assert plain.fingerprint == one.fingerprint
    assert EpochPlan(lengths, 2048, align_to=8).fingerprint != one.fingerprint
    # Lengths that are aligned already are packed into the same bins.
    round_lengths = lengths // 8 * 8 + 8
    kept = [rows.tolist() for rows in EpochPlan(round_lengths, 2048).bins(0, 10**6)]
    assert [rows.tolist() for rows in EpochPlan(round_lengths, 2048, align_to=8).bins(0, 10**6)] == kept


@pytest.mark.parametrize("align_to", [4, 16, 128])
def test_alignment_costs_its_slots_and_no_more(align_to):
    # Bins of 4096 slots; the fewest are ceil(slots / 4096), and planning adds at most 0.1 % to that.
    lengths = np.clip(np.random.default_rng(1).lognormal(5.4, 1.0, 200_000), 8, 4096).astype(np.uint16)
    plan = EpochPlan(lengths, 4096, align_to=align_to)
    slots = sum(aligned(int(n), align_to) * int(times) for n, times in enumerate(np.bincount(lengths)) if n)
    assert plan.num_slots == slots
    assert len(plan) <= 1.001 * -(-slots // 4096)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(align_to=0), "align_to is 0"),
        (dict(align_to=3), "capacity is 8 tokens, no multiple of align_to = 3: 2 slots .* of 6 or 9"),
        (dict(align_to=16), "capacity is 8 tokens, no multiple of align_to = 16: .* of 16 or 32"),
    ],
)
def test_alignments_that_make_no_sense(arguments, text):
    with pytest.raises(ValueError, match=text):
        EpochPlan([5, 5], 8, **arguments)


def test_groups_share_a_bin_by_the_slots_of_their_rows():
    # Two pairs of 5 and 3 tokens fill 16 slots, but take 24 when aligned to 4: a bin each.
    lengths, keys = [5, 3, 5, 3], [0, 0, 1, 1]
    assert len(EpochPlan(lengths, 16, together=keys)) == 1
    plan = EpochPlan(lengths, 16, together=keys, align_to=4)
    assert sorted(rows.tolist() for rows in plan.bins(0, 9)) == [[0, 1], [2, 3]]
    assert plan.costs(0, 9)[0].tolist() == [12, 12]
    with pytest.raises(ValueError, match="group 0 has 12 tokens in 2 rows"):
        EpochPlan(lengths, 8, together=keys, align_to=4)
