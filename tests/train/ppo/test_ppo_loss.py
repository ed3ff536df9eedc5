"""The PPO objective token by token, in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from multipack.train.ppo.loss import ppo_loss_sums


def sums_of(logprobs, values, old_logprobs, old_values, advantages, returns, entropy=None):
    def tensor(numbers):
        return torch.tensor(numbers, dtype=torch.float32, requires_grad=True)

    inputs = {"logprobs": tensor(logprobs), "values": tensor(values)}
    sums = ppo_loss_sums(
        **inputs,
        entropy=tensor(entropy or [0.0] * len(values)),
        old_logprobs=torch.tensor(old_logprobs),
        old_values=torch.tensor(old_values),
        advantages=torch.tensor(advantages),
        returns=torch.tensor(returns),
        clip_range=0.2,
        value_clip_range=0.5,
    )
    return sums, inputs


def test_four_tokens_by_hand():
    log2 = math.log(2)
    sums, _ = sums_of(
        logprobs=[log2, log2, -log2, 0.0],  # ratios 2, 2, 1/2, 1
        old_logprobs=[0.0, 0.0, 0.0, 0.0],
        advantages=[1.0, -1.0, 1.0, 3.0],
        values=[1.0, 0.0, 2.0, 0.0],
        old_values=[0.0, 0.0, 2.0, 0.0],
        returns=[1.0, 1.0, 0.0, 0.0],
        entropy=[1.0, 2.0, 3.0, 4.0],
    )
    # Gains above 1.2 stop counting: -1.2; losses never do: +2; -1/2; -3.
    assert sums.policy.item() == pytest.approx(-1.2 + 2.0 - 0.5 - 3.0)
    # Token 1 moved 1.0 from its old value, of which 0.5 counts: max(0, .25) / 2; then 1/2, 4/2 and 0.
    assert sums.value.item() == pytest.approx(0.125 + 0.5 + 2.0)
    assert sums.entropy.item() == 10.0
    assert sums.clipped.item() == 3
    assert sums.value_clipped.item() == 1
    # ratio - 1 - log ratio: twice 1 - log 2, once -1/2 + log 2, once 0.
    assert sums.divergence.item() == pytest.approx(2 * (1 - log2) + (log2 - 0.5))
    assert sums.largest_log_ratio.item() == pytest.approx(log2)


def test_clipped_gain_pulls_no_further():
    sums, inputs = sums_of([0.5, 0.1], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0])
    sums.policy.backward()
    assert inputs["logprobs"].grad.tolist() == pytest.approx([0.0, -math.exp(0.1)])


def test_without_actions_everything_is_zero_and_gradients_flow():
    sums, inputs = sums_of([], [], [], [], [], [])
    assert [value.item() for value in sums] == [0.0] * 7
    (sums.policy + sums.value).backward()
    assert inputs["values"].grad.shape == (0,)


def test_values_that_moved_far_either_way_are_counted():
    zeros = torch.zeros(4)
    sums = ppo_loss_sums(
        logprobs=zeros, entropy=zeros, old_logprobs=zeros, advantages=zeros, returns=zeros, old_values=zeros,
        values=torch.tensor([-1.0, -0.1, 0.1, 1.0]), clip_range=0.2, value_clip_range=0.2,
    )  # fmt: skip
    assert sums.value_clipped == 2
    assert sums.clipped == 0
