"""Concat-and-chunk: what is in each bin, against documents laid end to end by hand."""

from __future__ import annotations

import itertools
import json
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack.order.concat import ConcatPlan


def contents(plan: ConcatPlan, start: int = 0, stop: int | None = None) -> list[list[tuple[int, int, int]]]:
    bins = plan.bins(start, len(plan) if stop is None else stop)
    return [list(zip(*(array.tolist() for array in content), strict=True)) for content in bins]


def tokens(content: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(row, place in the row) of every token."""
    return [(row, start + i) for row, start, length in content for i in range(length)]


plans = st.builds(
    dict,
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80),
    capacity=st.integers(1, 40),
    window=st.none() | st.integers(1, 9),
    seed=st.integers(-5, 2**40),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    shuffle_block=st.integers(1, 7),
)


def test_the_example_of_trl_1850():
    # Documents of 6 and 3 tokens, capacity 4: 4, 4 and 1 tokens.
    plan = ConcatPlan([6, 3], 4, shuffle=False)
    assert contents(plan) == [[(0, 0, 4)], [(0, 4, 2), (1, 0, 2)], [(1, 2, 1)]]
    assert len(plan) == 3
    assert plan.num_tokens == 9
    assert plan.efficiency == 9 / 12


@given(plans)
def test_each_token_once_in_full_bins(arguments):
    plan = ConcatPlan(**arguments)
    bins = contents(plan)
    lengths = arguments["lengths"]
    assert len(bins) == len(plan) == -(-sum(lengths) // arguments["capacity"])
    found = sorted(token for content in bins for token in tokens(content))
    assert found == [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    sizes = sorted(len(tokens(content)) for content in bins)
    assert sizes[1:] == [arguments["capacity"]] * (len(bins) - 1)


@given(plans)
def test_bins_in_their_own_order_are_one_sequence_of_whole_documents(arguments):
    """Sorted by where they were cut, the bins give every document from its first token to its last without a
    break."""
    plan = ConcatPlan(**arguments)
    bins = [tokens(content) for content in contents(plan)]
    follows = {a: b for content in bins for a, b in itertools.pairwise(content)}
    for (row, i), (next_row, j) in follows.items():
        if i + 1 < arguments["lengths"][row]:
            assert (next_row, j) == (row, i + 1)
        else:
            assert j == 0


@given(plans, st.data())
def test_any_bin_alone_is_that_of_the_whole(arguments, data):
    bins = contents(ConcatPlan(**arguments))
    start = data.draw(st.integers(0, len(bins)))
    stop = data.draw(st.integers(start, len(bins) + 3))
    fresh = ConcatPlan(**arguments)
    assert contents(fresh, start, stop) == bins[start:stop]
    assert fresh.has_bin(len(bins) - 1)
    assert not fresh.has_bin(len(bins))


@given(plans)
def test_costs_are_those_of_what_attention_sees(arguments):
    bins = contents(ConcatPlan(**arguments))
    sums = [sum(length for _, _, length in content) for content in bins]
    for boundaries, squares in (
        ("document", [sum(length**2 for _, _, length in content) for content in bins]),
        ("bin", [total**2 for total in sums]),
    ):
        found = ConcatPlan(**arguments, boundaries=boundaries).costs(0, 10**9)
        assert [array.tolist() for array in found] == [sums, squares]


def test_order_of_documents_and_bins_changes_with_the_epoch():
    lengths = np.full(500, 10)
    plan = ConcatPlan(lengths, 16, seed=3, window=20)
    first, second = contents(plan), contents(plan.at_epoch(1))
    assert first != second
    assert contents(plan.at_epoch(1).at_epoch(0)) == first
    assert contents(ConcatPlan(lengths, 16, seed=4, window=20)) != first
    # Shuffled, the place of a bin says nothing about its documents; neighbours in a document are apart.
    apart = [abs(a - b) for a, b in _places_of_neighbours(first)]
    assert np.mean(apart) > 4
    in_order = contents(ConcatPlan(lengths, 16, shuffle=False))
    assert in_order[0] == [(0, 0, 10), (1, 0, 6)]


def _places_of_neighbours(bins):
    place = {token: b for b, content in enumerate(bins) for token in tokens(content)}
    return [
        (place[row, i], place[row, i + 1])
        for row, i in place
        if (row, i + 1) in place and place[row, i] != place[row, i + 1]
    ]


def test_a_block_of_rows_stays_together():
    plan = ConcatPlan(np.full(64, 4), 8, shuffle_block=8, window=4, seed=1)
    for content in contents(plan):
        assert len({row // 8 for row, _, _ in content}) == 1


def test_a_document_longer_than_many_windows():
    # 10^6 tokens in bins of 7, windows of 3 bins: the document begins and ends inside bins of others.
    plan = ConcatPlan([3, 10**6, 5], 7, window=3, shuffle=False)
    assert len(plan) == 142859
    assert contents(plan, 0, 2) == [[(0, 0, 3), (1, 0, 4)], [(1, 4, 7)]]
    assert contents(plan, 142857) == [[(1, 999996, 4), (2, 0, 3)], [(2, 3, 2)]]


def test_sums_are_64_bits_wide():
    plan = ConcatPlan(np.full(5, 2**31, np.uint32), 2**24, shuffle=False)
    assert plan.num_tokens == 5 * 2**31
    assert len(plan) == 640
    assert contents(plan, 639) == [[(4, 2**31 - 2**24, 2**24)]]


def test_many_threads_find_the_same_bins():
    arguments = dict(lengths=np.arange(1, 2000), capacity=64, window=5, seed=2)
    expected = contents(ConcatPlan(**arguments))
    plan = ConcatPlan(**arguments)
    wrong: list[int] = []

    def read(start: int) -> None:
        for i in range(start, len(plan), 8):
            if contents(plan, i, i + 1) != expected[i : i + 1]:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_it_pickles_and_names_its_inputs():
    plan = ConcatPlan(np.arange(1, 200), 16, seed=5, epoch=2, window=3)
    expected = contents(plan)
    assert contents(pickle.loads(pickle.dumps(plan))) == expected
    assert plan.inputs() == ConcatPlan(np.arange(1, 200, dtype=np.int32), 16, seed=5, window=3).inputs()
    assert json.loads(json.dumps(plan.inputs()))["method"] == "concat"


def test_bad_arguments_are_named():
    with pytest.raises(
        ValueError, match="row 1 has length 0, below 1: it would be a document without tokens"
    ):
        ConcatPlan([3, 0], 4)
    with pytest.raises(ValueError, match="boundaries 'sentence' is none of 'document', 'bin'"):
        ConcatPlan([3], 4, boundaries="sentence")
    with pytest.raises(ValueError, match="bin -1 is below 0"):
        ConcatPlan([3], 4).bins(-1, 1)
    assert len(ConcatPlan([], 4)) == 0
    assert ConcatPlan([], 4).bins(0, 5) == []
