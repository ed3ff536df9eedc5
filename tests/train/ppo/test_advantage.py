"""Advantages against the definition, in plain Python."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.train.ppo.advantage import explained_variance, generalized_advantages, whiten


def advantages_by_definition(rewards, values, offsets, discount, gae_lambda):
    """Sum over later tokens of (discount * gae_lambda)^k times the TD error k tokens later."""
    result = []
    for start, end in pairwise(offsets):
        td_errors = [
            rewards[t] + discount * (values[t + 1] if t + 1 < end else 0.0) - values[t]
            for t in range(start, end)
        ]
        result += [
            math.fsum((discount * gae_lambda) ** k * later for k, later in enumerate(td_errors[t:]))
            for t in range(len(td_errors))
        ]
    return result


def test_two_responses_by_hand():
    # Response 1, tokens (reward, value) (0, .5), (1, .25); discount .5, gae_lambda .5.
    # Last surprise 1 - .25 = .75; first 0 + .5 * .25 - .5 = -.375, plus .25 * .75 = -.1875. Response 2: 2 - 1
    # = 1.
    rewards = np.array([0, 1, 2], np.float32)
    values = np.array([0.5, 0.25, 1], np.float32)
    advantages, returns = generalized_advantages(
        rewards, values, np.array([0, 2, 2, 3]), discount=0.5, gae_lambda=0.5
    )
    assert advantages.tolist() == [-0.1875, 0.75, 1.0]
    assert returns.tolist() == [0.3125, 1.0, 2.0]
    assert advantages.dtype == returns.dtype == np.float32


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    discount=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_definition(lengths, discount, gae_lambda, seed):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rewards, values = rng.normal(size=(2, offsets[-1])).astype(np.float32)
    advantages, returns = generalized_advantages(
        rewards, values, offsets, discount=discount, gae_lambda=gae_lambda
    )
    right = advantages_by_definition(
        rewards.tolist(), values.tolist(), offsets.tolist(), discount, gae_lambda
    )
    assert advantages == pytest.approx(right, abs=1e-5)
    assert returns == pytest.approx(np.array(right) + values, abs=1e-5)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [0, 4]])
def test_offsets_must_cover_the_tokens(offsets):
    numbers = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="3 rewards and 3 values do not fit"):
        generalized_advantages(numbers, numbers, np.array(offsets), discount=1, gae_lambda=1)


def test_whitened_over_all_tokens():
    # Mean 4, variance (9 + 1 + 1 + 9) / 4 = 5.
    assert whiten(np.array([1, 3, 5, 7], np.float32)) == pytest.approx(
        np.array([-3, -1, 1, 3]) / math.sqrt(5)
    )


@pytest.mark.parametrize("equal", [[], [2.5], [1e6] * 1000])
def test_equal_advantages_become_zeros(equal):
    assert whiten(np.array(equal, np.float32)).tolist() == [0.0] * len(equal)


def test_explained_variance():
    returns = np.array([0, 2, 4, 6], np.float32)  # variance 5
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 3, np.float32), returns) == 0.0
    # Errors 0, 2, 0, 2: variance 1, so 1 - 1 / 5.
    assert explained_variance(np.array([0, 0, 4, 4], np.float32), returns) == pytest.approx(0.8)
    assert math.isnan(explained_variance(np.zeros(4, np.float32), np.ones(4, np.float32)))


def test_whitening_keeps_small_differences_of_large_advantages():
    # Less their mean of 16777212 2/3 they are -5/3, 7/3 and -2/3; the variance is 78/27. In 32 bits the mean
    # would be 16777213.
    large = np.array([16777211, 16777215, 16777212], np.float32)
    right = np.array([-5 / 3, 7 / 3, -2 / 3]) / np.sqrt(78 / 27)
    np.testing.assert_allclose(whiten(large), right, atol=1e-6)
