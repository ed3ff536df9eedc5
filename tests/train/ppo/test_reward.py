"""Rewards are checked before a loss sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multipack.train.ppo.reward import token_rewards

PROMPTS = [{"input_ids": [5, 6]}, {"input_ids": [7]}, {"input_ids": [8]}]
RESPONSES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}, {"input_ids": []}]


def rewarded(answers):
    return token_rewards(lambda prompts, responses: answers, PROMPTS, RESPONSES)


def test_sequence_rewards_go_to_the_last_token():
    rewards, scores = rewarded([0.5, -1.0, 7.0])
    assert rewards.tolist() == [0.0, 0.0, 0.5, -1.0]
    # The response without a token cannot be taught anything, and still counts in the mean.
    assert scores.tolist() == [0.5, -1.0, 7.0]
    assert rewards.dtype == scores.dtype == np.float32


def test_token_rewards_are_summed_into_scores():
    rewards, scores = rewarded([[1, 2, 3], torch.tensor([0.25]), np.zeros(0)])
    assert rewards.tolist() == [1.0, 2.0, 3.0, 0.25]
    assert scores.tolist() == [6.0, 0.25, 0.0]


def test_nobody_is_asked_about_nothing():
    rewards, scores = token_rewards(lambda prompts, responses: 1 / 0, [], [])
    assert len(rewards) == len(scores) == 0


def test_the_function_sees_both_sides():
    seen = []
    token_rewards(
        lambda prompts, responses: seen.append((prompts, responses)) or [0, 0, 0], PROMPTS, RESPONSES
    )
    assert seen == [(PROMPTS, RESPONSES)]


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([1.0, 2.0], ValueError, "returned 2 rewards for 3 responses"),
        ([1.0, float("nan"), 0.0], ValueError, "reward of response 1 is nan"),
        ([1.0, 0.0, -np.inf], ValueError, "reward of response 2 is -inf"),
        ([[1.0, 2.0], 0.0, 0.0], ValueError, r"shape \(2,\) for response 0 of 3"),
        ([[1.0, 2.0, float("nan")], 0.0, 0.0], ValueError, "every weight NaN"),
        (None, ValueError, "returned None for 3 responses"),
        (["good", 0.0, 0.0], TypeError, "reward of response 0 is 'good'"),
        ([None, 0.0, 0.0], ValueError, "reward of response 0 is None"),
    ],
)
def test_wrong_answers_are_named(answers, error, message):
    with pytest.raises(error, match=message):
        rewarded(answers)


def test_prompts_of_wrong_rewards_are_named_by_file_and_line():
    places = ["p.jsonl, line 3", "p.jsonl, line 8", "p.jsonl, line 9"]
    with pytest.raises(ValueError, match=r"reward of response 1 \(p.jsonl, line 8\) is nan"):
        token_rewards(lambda prompts, responses: [0.0, float("nan"), 0.0], PROMPTS, RESPONSES, places)

    def fails_at_7(prompts, responses):
        return [{5: 0.0, 8: 1.0}[prompt["input_ids"][0]] for prompt in prompts]

    with pytest.raises(ValueError) as caught:
        token_rewards(fails_at_7, PROMPTS, RESPONSES, places)
    said = str(caught.value)
    assert said.startswith("The reward function raises KeyError: 7 (")
    assert "test_reward.py, line" in said  # the line of the user's own code
    assert "at response 1 (p.jsonl, line 8)" in said
    assert "\n" not in said


def test_a_reward_that_only_fails_on_several_names_all_of_them():
    def fails_together(prompts, responses):
        assert len(prompts) == 1, "one at a time"
        return [0.0]

    with pytest.raises(ValueError, match="at the 3 responses from response 0 to response 2 together"):
        token_rewards(fails_together, PROMPTS, RESPONSES)
