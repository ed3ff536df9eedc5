"""The ragged buffer and the packed micro-batches made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multipack.order.batch import BatchIndices
from multipack.train.ppo.buffer import actions_of, as_dataset, micro_batches
from multipack.train.ppo.experience import learn_from
from multipack.train.ppo.generate import Responses
from multipack.train.ppo.rollouts import make_rollouts, offsets_of, row_elements, take_rows
from multipack.train.ppo.scoring import BufferScores


def answered(token_ids, finished):
    ids = [np.array(row, np.int64) for row in token_ids]
    return Responses(ids, np.array(finished, np.bool_), [np.full(len(row), -1, np.float32) for row in ids])


@pytest.fixture
def rollouts():
    # The third response is empty.
    return make_rollouts(
        collect_step=3,
        prompt_rows=[7, 2, 9],
        prompts=[[11, 12], [13], [14, 15, 16]],
        responses=answered([[21, 22, 1], [23, 1], []], [True, True, False]),
        rewards=np.array([0, 0, 1, 0, 2], np.float32),
        sequence_rewards=np.array([1, 2, 0], np.float32),
    )


def test_ragged_layout(rollouts):
    assert rollouts.tokens.tolist() == [11, 12, 21, 22, 1, 13, 23, 1, 14, 15, 16]
    assert rollouts.lengths.tolist() == [5, 3, 3]
    assert rollouts.action_offsets.tolist() == [0, 3, 5, 5]
    assert rollouts.action_mask.tolist() == [False, False, True, True, True, False, True, True, *[False] * 3]
    assert rollouts.collect_steps.tolist() == [3, 3, 3]


def test_a_share_may_be_empty():
    empty = make_rollouts(0, [], [], answered([], []), np.zeros(0, np.float32), np.zeros(0, np.float32))
    assert len(empty) == 0
    assert empty.tokens.dtype == np.int32
    assert empty.action_offsets.tolist() == [0]


def test_rows_are_taken_in_the_order_asked_for():
    lengths = np.array([2, 0, 3])
    values = np.array([10, 11, 30, 31, 32])
    assert offsets_of(lengths).tolist() == [0, 2, 2, 5]
    assert take_rows(values, lengths, np.array([2, 1, 0, 2])).tolist() == [30, 31, 32, 10, 11, 30, 31, 32]
    assert row_elements(lengths, np.array([2, 0])).tolist() == [2, 3, 4, 0, 1]
    assert take_rows(values, lengths, np.zeros(0, np.int64)).tolist() == []


def test_packed_micro_batch_asks_for_the_actions(rollouts):
    dataset = as_dataset(rollouts, {"advantages": np.array([1, 2, 3, 4, 5], np.float32)})
    plan = [
        [BatchIndices([1]), BatchIndices([2, 0])],
        [BatchIndices([1]), BatchIndices([1], repeated=True)],
    ]
    first, second = micro_batches(dataset, [plan], 1, 0, torch.device("cpu"))
    assert first["input_ids"].tolist() == [[14, 15, 16, 11, 12, 21, 22, 1]]
    assert first["labels"].tolist() == [[-100, -100, -100, -100, -100, 21, 22, 1]]
    actions = actions_of(first)
    assert actions.tokens.tolist() == [21, 22, 1]
    assert actions.positions.tolist() == [4, 5, 6]  # the token before each action predicts it
    assert first["advantages"][0, actions.positions + 1].tolist() == [1.0, 2.0, 3.0]
    assert actions.inputs["cu_seq_lens_q"].tolist() == [0, 3, 8]
    assert len(actions_of(second).tokens) == 0  # a repeat only keeps the rank in step


def test_learning_punishes_divergence_and_whitens(rollouts):
    zeros = np.zeros(5, np.float32)
    scores = BufferScores(np.float32([0, 0, -1, -1, -1]), np.float32([0, 0, -2, -1, -1]), zeros, zeros)
    learnt = learn_from(rollouts, scores, kl_coef=0.5, discount=1.0, gae_lambda=1.0)
    # Reward 1 less 0.5 nats at the third token; without a critic the returns are the sums of what follows.
    assert learnt.returns.tolist() == [0.5, 0.5, 0.5, 2.0, 2.0]
    assert learnt.advantages.mean() == pytest.approx(0, abs=1e-6)
    assert learnt.advantages.std() == pytest.approx(1, abs=1e-6)
    metrics = learnt.metrics()
    assert metrics["kl_k1"] == pytest.approx(1 / 3)  # one nat over three responses
    assert metrics["kl"] == pytest.approx((np.exp(-1) - 1 + 1) / 3)
    assert metrics["reward"] == pytest.approx(1.0)
    assert metrics["response_tokens"] == pytest.approx(5 / 3)
    assert metrics["finished_share"] == pytest.approx(2 / 3)
    # Sampled at -1 nat each, scored at 0, 0, -1, -1, -1: k3 of a token that became likelier by one nat is e -
    # 2.
    assert metrics["mismatch_kl"] == pytest.approx(2 * (np.e - 2) / 5)
    assert metrics["mismatch_max"] == 1.0


def test_nothing_can_be_learnt_from_empty_responses():
    empty = make_rollouts(
        0,
        [0, 1],
        [[5], [6]],
        answered([[], []], [False, False]),
        np.zeros(0, np.float32),
        np.ones(2, np.float32),
    )
    none = BufferScores(*[np.zeros(0, np.float32)] * 4)
    with pytest.raises(ValueError, match="None of 2 responses has a token"):
        learn_from(empty, none, kl_coef=0.0, discount=1.0, gae_lambda=1.0)
