"""Groups of rows that share a bin: packed as one sequence, expanded in the order of the source, never
split."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import EpochPlan, pack
from multipack.order.groups import Groups
from multipack.order.packing import lower_bound


def bins_of_plan(plan: EpochPlan) -> list[list[int]]:
    return [rows.tolist() for rows in plan.bins(0, len(plan))]


def assert_whole(bins: list[list[int]], keys: list) -> None:
    """Each row once; the rows of a group in one bin, beside each other, in the order of the source."""
    assert sorted(row for rows in bins for row in rows) == list(range(len(keys)))
    members: dict = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    for rows in bins:
        while rows:
            group = members.pop(keys[rows[0]])
            assert rows[: len(group)] == group
            rows = rows[len(group) :]
    assert members == {}


@pytest.mark.report("huggingface/trl#2469")
def test_pairs_share_a_bin_with_the_chosen_first():
    # Groups of 7, 6 and 4 tokens: {7} and {6, 4}.
    lengths, keys = [3, 4, 5, 1, 2, 2], [0, 0, 1, 1, 2, 2]
    packing = pack(lengths, 10, together=keys)
    assert sorted(sorted(packing[b].tolist()) for b in range(len(packing))) == [[0, 1], [2, 3, 4, 5]]
    assert packing.lower_bound == 2 == lower_bound(Groups(keys).tokens(np.array(lengths)), 10)
    plan = EpochPlan(lengths, 10, together=keys)
    assert len(plan) == plan.min_bins == 2
    assert_whole(bins_of_plan(plan), keys)
    assert sorted(plan.costs(0, 2)[0].tolist()) == [7, 10]


@pytest.mark.report("google/tunix#820")
def test_answers_to_one_prompt_are_never_mixed_with_those_to_another():
    # 4 prompts of 4 answers of 5 tokens; 30 tokens hold one and a half.
    keys = np.repeat(["what", "why", "how", "who"], 4)
    plan = EpochPlan([5] * 16, 30, together=keys)
    assert len(plan) == 4
    assert all(len(set(keys[rows])) == 1 for rows in plan.bins(0, 4))


def test_a_group_above_the_capacity_is_named():
    lengths, keys = [2, 6, 6, 5, 1], ["a", "b", "b", "b", "c"]
    text = (
        r"group b has 17 tokens in 3 rows \(the first is row 1\), above the capacity of 16; 1 groups are too long, "
        r"the longest has 17"
    )
    for planned in pack, EpochPlan:
        with pytest.raises(ValueError, match=text):
            planned(lengths, 16, together=keys)
        assert len(planned(lengths, 17, together=keys)) == 2


cases = st.integers(1, 40).flatmap(
    lambda num_rows: st.fixed_dictionaries(
        {
            "lengths": st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows),
            "keys": st.one_of(
                st.lists(st.integers(-3, 6), min_size=num_rows, max_size=num_rows),
                st.lists(st.sampled_from("abcdefghij"), min_size=num_rows, max_size=num_rows),
                st.lists(st.integers(0, 12), min_size=num_rows, max_size=num_rows).map(sorted),
            ),
        }
    )
)


@given(
    case=cases,
    spare=st.integers(0, 30),
    method=st.sampled_from(["auto", "stream", "best_fit_decreasing", "next_fit", "fewest"]),
    window=st.none() | st.integers(1, 4),
    shuffle=st.booleans(),
    block=st.integers(1, 3),
    epoch=st.integers(0, 2),
)
def test_no_group_is_split_and_each_comes_once(case, spare, method, window, shuffle, block, epoch):
    lengths, keys = np.array(case["lengths"]), case["keys"]
    totals = {key: int(lengths[[k == key for k in keys]].sum()) for key in keys}
    capacity = max(totals.values()) + spare
    plan = EpochPlan(
        lengths,
        capacity,
        together=keys,
        method=method,
        window=window,
        shuffle=shuffle,
        shuffle_block=block,
        epoch=epoch,
    )
    bins = bins_of_plan(plan)
    tokens, squares = plan.costs(0, len(plan))
    assert tokens.tolist() == [lengths[rows].sum() for rows in bins]
    assert squares.tolist() == [(lengths[rows] ** 2).sum() for rows in bins]
    assert tokens.max() <= capacity
    fresh = EpochPlan(
        lengths,
        capacity,
        together=keys,
        method=method,
        window=window,
        shuffle=shuffle,
        shuffle_block=block,
        epoch=epoch,
    )
    assert [rows.tolist() for rows in fresh.bins(len(bins) - 1, len(bins))] == bins[-1:]
    assert fresh.has_bin(len(bins) - 1)
    assert not fresh.has_bin(len(bins))
    assert_whole(bins, keys)
    packing = pack(lengths, capacity, method=method, together=keys)
    assert_whole([packing[b].tolist() for b in range(len(packing))], keys)
    assert len(packing) >= packing.lower_bound >= lower_bound(list(totals.values()), capacity)


@given(cases)
def test_groups_know_their_rows_and_rows_their_group(case):
    keys, lengths = case["keys"], np.array(case["lengths"])
    groups = Groups(keys)
    seen = list(dict.fromkeys(keys))  # by their first rows
    assert groups.names.tolist() == seen
    assert len(groups) == len(seen)
    assert groups.of(np.arange(len(keys))).tolist() == [seen.index(key) for key in keys]
    for g, key in enumerate(seen):
        assert groups.rows(g).tolist() == [row for row, k in enumerate(keys) if k == key]
    assert groups.tokens(lengths).tolist() == [lengths[groups.rows(g)].sum() for g in range(len(seen))]
    assert groups.largest == max(keys.count(key) for key in seen)


def test_groups_of_one_row_are_planned_as_rows():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    plain, grouped = EpochPlan(lengths, 256), EpochPlan(lengths, 256, together=np.arange(2000))
    assert bins_of_plan(grouped) == bins_of_plan(plain)
    assert "together" not in plain.inputs()
    assert grouped.fingerprint != plain.fingerprint


def test_the_fingerprint_names_who_belongs_to_whom():
    prints = {
        EpochPlan([1, 2, 3, 4], 10, together=keys).fingerprint
        for keys in ([0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0])
    }
    assert len(prints) == 4
    assert (
        EpochPlan([1, 2, 3, 4], 10, together=[7, 7, 5, 5]).fingerprint
        == EpochPlan([1, 2, 3, 4], 10, together=Groups(list("aabb"))).fingerprint
    )


def test_a_limit_of_sequences_counts_rows_and_is_kept():
    keys = np.repeat(np.arange(50), 3)
    plan = EpochPlan([1] * 150, 1000, together=keys, max_sequences_per_bin=10)
    assert {len(rows) for rows in bins_of_plan(plan)} == {9, 6}  # three groups of three, 16 times, and two
    with pytest.raises(ValueError, match="group 0 has 3 rows, above max_sequences_per_bin=2"):
        EpochPlan([1] * 150, 1000, together=keys, max_sequences_per_bin=2)


def test_the_order_of_an_epoch_of_groups_is_the_same_in_every_version_and_place():
    lengths = [(7 * i * i + 3 * i) % 97 + 1 for i in range(500)]
    plan = EpochPlan(lengths, 512, seed=9, window=20, together=[i * i % 251 for i in range(500)])
    rows = np.concatenate(plan.bins(0, len(plan)))
    # Written down once, as in test_plan.
    assert (plan.num_windows, len(plan), int(rows @ np.arange(500))) == (3, 53, 31213843)


def test_a_packer_of_the_users_own_gets_groups():
    def alone(lengths, capacity):
        assert sorted(lengths.tolist()) == [4, 6, 7]
        return np.arange(len(lengths) + 1), np.arange(len(lengths))

    assert len(EpochPlan([3, 4, 5, 1, 2, 2], 10, together=[0, 0, 1, 1, 2, 2], method=alone)) == 3


def test_groups_are_pickled_with_their_plan():
    plan = EpochPlan([3, 4, 5, 1, 2, 2], 10, together=list("abbcca"))
    assert bins_of_plan(pickle.loads(pickle.dumps(plan))) == bins_of_plan(plan)


def test_no_rows_have_no_groups():
    assert len(pack([], 8, together=[])) == 0
    assert len(EpochPlan([], 8, together=[])) == 0
    assert Groups([]).largest == 0


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([0, 0], ValueError, "together has 2 keys for 3 rows"),
        ([0.0, 1.0, 2.0], TypeError, "whole numbers or strings, not float64"),
        ([None, "a", "b"], TypeError, "whole numbers or strings, not object: key 0 is None"),
        ([[0], [1], [2]], ValueError, r"one key a row, not of shape \(3, 1\)"),
    ],
)
def test_bad_keys_are_named(keys, error, text):
    for planned in pack, EpochPlan:
        with pytest.raises(error, match=text):
            planned([1, 2, 3], 8, together=keys)


@pytest.mark.parametrize(("size", "capacity"), [(2, 4096), (8, 32768)])
def test_groups_fill_bins_as_well_as_single_rows(size, capacity):
    rows = np.clip(np.random.default_rng(0).lognormal(np.log(350) - 0.5, 1.0, 200_000), 8, 4096 // 2)
    lengths, keys = rows.astype(np.int32), np.arange(200_000) // size
    plan = EpochPlan(lengths, capacity, together=keys)
    sorted_bins = len(pack(Groups(keys).tokens(lengths), capacity, method="best_fit_decreasing"))
    assert len(plan) <= 1.001 * sorted_bins + plan.num_windows
