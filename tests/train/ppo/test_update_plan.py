"""Optimizer steps and micro-batches: everything once, nothing too large, the same number on every rank."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.order.packing import pack
from multipack.train.ppo.update_plan import num_optimizer_steps, plan_step, step_rows


def plan(lengths, rows, capacity, ranks):
    return plan_step(
        np.array(lengths), np.array(rows), micro_batch_tokens=capacity, num_replicas=ranks, hidden_size=64
    )


def real_micro_batches(step):
    return [batch for micro_step in step for batch in micro_step if not batch.repeated]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    capacity=st.integers(20, 60),
    ranks=st.integers(1, 6),
)
@pytest.mark.report("OpenRLHF/OpenRLHF#397")
def test_each_sequence_once_within_capacity_on_equal_ranks(lengths, capacity, ranks):
    step = plan(lengths, range(len(lengths)), capacity, ranks)
    assert all(len(micro_step) == ranks for micro_step in step)
    assert all(len(rows) for micro_step in step for rows in micro_step)
    real = real_micro_batches(step)
    assert Counter(row for rows in real for row in rows) == Counter(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= capacity for rows in real)
    # As few rounds as packing needs, and repeats only where there are fewer sequences than places.
    assert len(step) <= -(-len(pack(lengths, capacity, method="best_fit_decreasing")) // ranks)
    num_repeats = sum(batch.repeated for micro_step in step for batch in micro_step)
    assert num_repeats == max(0, len(step) * ranks - len(lengths))


def test_micro_batches_of_a_round_are_even():
    # 17 sequences of 6 in bins of 12 need nine bins, so two rounds of 8 ranks: 16 micro-batches, one of which
    # has two.
    step = plan([6] * 17, range(17), 12, 8)
    tokens = [[6 * len(rows) for rows in micro_step] for micro_step in step]
    assert sorted(chain.from_iterable(tokens)) == [6] * 15 + [12]


def test_full_bins_that_cannot_be_spread_are_kept_and_halved():
    # 9 + 3 and 8 + 2 + 2 fill bins of 12; longest-first would put 9, 8 | 3, 2, 2 as (9 + 2 | 8 + 3 + 2 = 13).
    step = plan([9, 3, 8, 2, 2], range(5), 12, 2)
    assert {tuple(sorted(rows)) for rows in step[0]} == {(0, 1), (2, 3, 4)}


def test_fewer_sequences_than_ranks_repeat_without_counting():
    step = plan([5, 7, 3], [2, 0], 10, 4)
    assert len(step) == 1
    assert [batch.repeated for batch in step[0]] == [False, False, True, True]
    assert real_micro_batches(step) == [[0], [2]]


def test_an_epoch_takes_each_row_once_a_pass_in_a_new_order():
    steps = list(step_rows(10, 4, "epochs", 3, [1, 2]))
    assert [len(rows) for rows in steps] == [4, 4, 2] * 3
    passes = [np.concatenate(steps[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(rows) == list(range(10)) for rows in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [rows.tolist() for rows in step_rows(10, 4, "epochs", 3, [1, 2])] == [r.tolist() for r in steps]
    assert [rows.tolist() for rows in step_rows(10, 4, "epochs", 3, [1, 3])] != [r.tolist() for r in steps]


def test_sampled_steps_have_no_row_twice():
    steps = list(step_rows(10, 4, "steps", 50, [0]))
    assert len(steps) == 50
    assert all(len(set(rows.tolist())) == 4 for rows in steps)
    counts = Counter(row for rows in steps for row in rows.tolist())
    assert set(counts) == set(range(10))


@pytest.mark.parametrize(
    ("buffer", "batch", "mode", "count", "steps"),
    [(64, 64, "epochs", 1, 1), (64, 16, "epochs", 4, 16), (14, 16, "epochs", 2, 2), (14, 16, "steps", 5, 5)],
)
@pytest.mark.report("InternLM/xtuner#1393")
def test_count_of_optimizer_steps(buffer, batch, mode, count, steps):
    assert num_optimizer_steps(buffer, batch, mode, count) == steps
    assert len(list(step_rows(buffer, batch, mode, count, [0]))) == steps
