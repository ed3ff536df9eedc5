"""Plans: windows, exact length, any bin alone, the same on every rank and in every process."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack import EpochPlan, forecast, pack


def rows_of(plan: EpochPlan) -> list[int]:
    return [int(row) for rows in plan.bins(0, len(plan)) for row in rows]


plans = st.builds(
    dict,
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=150),
    capacity=st.integers(50, 90),
    window=st.none() | st.integers(1, 9),
    seed=st.integers(-5, 2**40),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    shuffle_block=st.integers(1, 7),
    method=st.sampled_from(["auto", "stream", "best_fit_decreasing", "next_fit"]),
    max_sequences_per_bin=st.none() | st.integers(1, 4),
)


@given(plans)
def test_each_row_once_within_capacity(arguments):
    plan = EpochPlan(**arguments)
    lengths = arguments["lengths"]
    bins = plan.bins(0, 10**9)
    assert len(bins) == len(plan)
    assert sorted(int(row) for rows in bins for row in rows) == list(range(len(lengths)))
    tokens, squares = plan.costs(0, 10**9)
    for rows, total, square in zip(bins, tokens, squares, strict=True):
        assert total == sum(lengths[row] for row in rows) <= arguments["capacity"]
        assert square == sum(lengths[row] ** 2 for row in rows)


@given(plans, st.data())
def test_any_bin_alone_is_that_of_the_whole(arguments, data):
    whole = EpochPlan(**arguments)
    bins = [rows.tolist() for rows in whole.bins(0, len(whole))]
    start = data.draw(st.integers(0, len(bins)))
    stop = data.draw(st.integers(start, len(bins) + 3))
    fresh = EpochPlan(**arguments)
    assert [rows.tolist() for rows in fresh.bins(start, stop)] == bins[start:stop]
    assert fresh.has_bin(len(bins) - 1)
    assert not fresh.has_bin(len(bins))


def test_epochs_and_seeds_give_other_orders_of_the_same_rows():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    orders = {
        (seed, epoch): rows_of(EpochPlan(lengths, 256, seed=seed, epoch=epoch))
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order) == list(range(1000)) for order in orders.values())
    again = EpochPlan(lengths, 256, seed=1).at_epoch(1)
    assert rows_of(again) == orders[1, 1]


def test_rows_packed_together_seldom_meet_again():
    # A bin holds about 12 rows of 20,000. Next-fit on a shuffle lets a pair meet again by chance only.
    lengths = np.clip(np.random.default_rng(1).lognormal(5.4, 1.0, 20_000), 8, 4096).astype(np.int32)

    def met_again(method):
        pairs = []
        for epoch in (0, 1):
            plan = EpochPlan(lengths, 4096, epoch=epoch, method=method)
            pairs.append(
                {
                    (a, b)
                    for rows in plan.bins(0, len(plan))
                    for a in rows.tolist()
                    for b in rows.tolist()
                    if a < b
                }
            )
        return len(pairs[0] & pairs[1]) / len(pairs[0])

    assert met_again("auto") <= 1.5 * met_again("next_fit") + 0.0005
    assert met_again("best_fit_decreasing") > 0.01  # sorting ties bins to lengths: they meet again


@pytest.mark.report("Qihoo360/360-LLaMA-Factory#27")
@pytest.mark.parametrize("method", ["auto", "stream", "best_fit_decreasing", "next_fit"])
def test_position_in_the_epoch_says_nothing_about_length(method):
    lengths = np.random.default_rng(2).integers(1, 101, 5000)
    plan = EpochPlan(lengths, 256, method=method)
    longest = [lengths[rows].max() for rows in plan.bins(0, len(plan))]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.1


def test_without_shuffle_bins_come_in_the_order_of_their_first_row():
    lengths = np.random.default_rng(3).integers(1, 60, 3000)
    for method in ("auto", "stream", "best_fit_decreasing", "next_fit"):
        plan = EpochPlan(lengths, 64, shuffle=False, method=method, window=50)
        first = [int(rows.min()) for rows in plan.bins(0, len(plan))]
        assert first == sorted(first)
    assert rows_of(EpochPlan(lengths, 64, shuffle=False, method="next_fit")) == list(range(3000))


def test_blocks_of_neighbours_stay_in_one_window():
    plan = EpochPlan(np.full(1003, 10), 100, shuffle_block=50, window=20)
    assert plan.num_windows == 5
    windows = [set() for _ in range(plan.num_windows)]
    for w in range(plan.num_windows):
        windows[w] = {int(row) // 50 for row in plan._window_of(w).rows}
    whole = [w - {20} for w in windows]  # block 20 holds the last 3 rows
    assert sum(map(len, whole)) == 20
    assert set.union(*whole) == set(range(20))


def test_windows_cost_less_than_a_ten_thousandth():
    lengths = np.clip(np.random.default_rng(4).lognormal(5.4, 1.0, 400_000), 8, 4096).astype(np.uint16)
    plan = EpochPlan(lengths, 4096)
    assert plan.num_windows > 1
    assert plan.efficiency > 0.9998
    assert len(plan) - plan.min_bins <= 2 * plan.num_windows


def test_lengths_are_not_copied_and_little_is_kept():
    lengths = np.full(100_000, 100, np.uint16)
    plan = EpochPlan(lengths, 4096)
    assert len(plan) == -(-100_000 // 40)
    assert plan.lengths is lengths
    assert len(pickle.dumps(plan)) < lengths.nbytes + 5000


def test_the_length_may_be_asked_for_while_a_thread_plans():
    plan = EpochPlan([5] * 30, 10, window=3)
    length = len(plan.at_epoch(0))
    asking = threading.Thread(target=plan.__len__)

    class Ends(list):
        def __len__(self):  # between a thread's look at the list and its append
            number = super().__len__()
            if plan._lock.locked() and asking.ident is None:
                asking.start()
                asking.join(0.2)
            return number

    plan._ends = Ends(plan._ends)
    assert plan.has_bin(0)
    asking.join()
    assert len(plan) == length == 15
    assert list(plan._ends) == [0, 3, 6, 9, 12, 15]


def test_a_pickled_plan_gives_the_same_bins():
    lengths = np.random.default_rng(5).integers(1, 60, 3000)
    plan = EpochPlan(lengths, 64, window=30)
    plan.bins(0, 3)
    copy = pickle.loads(pickle.dumps(plan))
    assert rows_of(copy) == rows_of(plan)
    assert copy.fingerprint == plan.fingerprint


def test_another_process_plans_the_same():
    code = (
        "import hashlib, numpy as np\n"
        "from multipack import EpochPlan\n"
        "lengths = np.random.default_rng(6).integers(1, 500, 20000)\n"
        "plan = EpochPlan(lengths, 2048, seed=3, epoch=2, window=500)\n"
        "rows = np.concatenate(plan.bins(0, len(plan)))\n"
        "print(hashlib.sha256(rows.tobytes()).hexdigest(), plan.fingerprint)\n"
    )
    answers = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("arguments", "num_bins", "expected"),
    [
        ({}, 216, 31229070),
        ({"epoch": 3}, 217, 30348819),
        ({"shuffle_block": 4}, 216, 29006817),
        ({"shuffle": False}, 216, 41491432),
    ],
)
def test_the_order_of_an_epoch_is_the_same_in_every_version_and_place(arguments, num_bins, expected):
    # Written down once; a change means that saved positions go on in another order than they were saved in.
    lengths = [(7 * i * i + 3 * i) % 97 + 1 for i in range(500)]
    plan = EpochPlan(lengths, 128, seed=9, window=20, **arguments)
    assert (plan.num_windows, len(plan)) == (10, num_bins)
    assert int(np.dot(rows_of(plan), np.arange(500))) == expected


def test_fingerprint_names_every_input():
    lengths = np.arange(1, 40)
    base = dict(lengths=lengths, capacity=64)
    others = [
        dict(base, lengths=lengths[::-1]),
        dict(base, capacity=65),
        dict(base, seed=1),
        dict(base, epoch=1),
        dict(base, shuffle=False),
        dict(base, method="stream"),
        dict(base, window=5),
        dict(base, shuffle_block=2),
        dict(base, max_sequences_per_bin=3),
    ]
    prints = [EpochPlan(**arguments).fingerprint for arguments in [base, *others]]
    assert len(set(prints)) == len(prints)
    assert EpochPlan(lengths.astype(np.uint16), 64).fingerprint == prints[0]


def test_the_users_own_packer_packs_each_window():
    def one_each(lengths, capacity):
        return np.arange(len(lengths) + 1), np.arange(len(lengths))

    plan = EpochPlan([5] * 30, 10, method=one_each, window=3)
    assert len(plan) == 30
    assert "one_each" in plan.fingerprint


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(epoch=-1), "epoch is -1"),
        (dict(window=0), "window is 0"),
        (dict(shuffle_block=0), "shuffle_block is 0"),
        (dict(capacity=3), "row 0 has 5 tokens, above the capacity of 3"),
    ],
)
def test_bad_input_is_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        EpochPlan(**{"lengths": [5, 5], "capacity": 8, **arguments})
    for name in ("seed", "epoch", "window", "shuffle_block", "max_sequences_per_bin"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, not 1.5"):
            EpochPlan([5], 8, **{name: 1.5})


def test_forecast_is_that_of_packing_the_rows():
    lengths = np.random.default_rng(7).integers(1, 100, 5000)
    answer = forecast(np.bincount(lengths), 256)
    packing = pack(lengths, 256, method="best_fit_decreasing")
    assert (answer.num_bins, answer.lower_bound) == (len(packing), packing.lower_bound)
    assert answer.efficiency == pytest.approx(packing.efficiency)
    assert answer.steps(num_replicas=4, accumulate=2) == -(-len(packing) // 8)
    assert answer.steps(4) == -(-len(packing) // 4)


def test_forecast_of_a_hundred_billion_rows():
    # 10^11 rows of 1..1000 tokens at capacity 1001: pairs l + (1001 - l) fill 5 * 10^10 bins exactly.
    histogram = np.full(1001, 10**8)
    histogram[0] = 0
    answer = forecast(histogram, 1001)
    assert answer.num_bins == answer.lower_bound == 5 * 10**10
    assert answer.num_sequences == 10**11


@pytest.mark.parametrize(
    ("histogram", "text"),
    [
        ([1, 2], "counts 1 empty sequences"),
        ([0, -2], r"histogram\[1\] is -2, below 0"),
        ([0] * 9 + [1], "sequences of 9 tokens, above the capacity of 8"),
        ([0, 0, 2**62, 2**62], r"above the 2\^63 - 1"),
    ],
)
def test_forecast_names_bad_histograms(histogram, text):
    with pytest.raises(ValueError, match=text):
        forecast(histogram, 8)
    with pytest.raises(ValueError, match="max_sequences_per_bin is 0, below 1"):
        forecast([0, 5], 8, max_sequences_per_bin=0)
