"""Advantages on the ragged layout: all responses of the buffer one after the other, no padding.

Every rank holds the whole buffer and computes the same numbers from it, so mean and variance are those of all
ranks without a collective.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def _advantages_in_place(
    rewards: Any, values: Any, offsets: Any, discount: float, gae_lambda: float, advantages: Any
) -> None:
    for sequence in range(len(offsets) - 1):
        later_value = 0.0  # a response ends its episode, also where it was cut off at the length limit
        later_advantage = 0.0
        for token in range(offsets[sequence + 1] - 1, offsets[sequence] - 1, -1):
            td_error = rewards[token] + discount * later_value - values[token]
            later_advantage = td_error + discount * gae_lambda * later_advantage
            later_value = values[token]
            advantages[token] = later_advantage


_compiled_advantages_in_place = numba.njit(cache=True)(_advantages_in_place)


def generalized_advantages(
    rewards: FloatArray,
    values: FloatArray,
    offsets: npt.NDArray[np.int64],
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[FloatArray, FloatArray]:
    """Generalized advantage estimation (Schulman et al. 2016) of many responses at once.

    Args:
        rewards: reward of each action token, shape [action_tokens], float32.
        values: the critic's value before each action token, shape [action_tokens], float32.
        offsets: response s is `rewards[offsets[s]:offsets[s + 1]]`, shape [sequences + 1]; empty responses
            are allowed.
        discount: gamma, 0..1.
        gae_lambda: lambda, 0..1: 0 trusts the critic, 1 the rewards alone.

    Returns:
        advantages and returns (advantages + values), float32, shape [action_tokens].

    Raises:
        ValueError: the arrays do not cover the same tokens, so that tokens would be read twice or not at all.
    """
    covered = int(offsets[-1]) if len(offsets) else -1
    if not (len(rewards) == len(values) == covered) or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise ValueError(
            f"{len(rewards)} rewards and {len(values)} values do not fit offsets that end at {covered}: "
            "give one reward and one value an action token, and rising offsets that start at 0."
        )
    advantages = np.empty(len(rewards), np.float32)
    _compiled_advantages_in_place(
        np.ascontiguousarray(rewards, np.float32),
        np.ascontiguousarray(values, np.float32),
        np.ascontiguousarray(offsets, np.int64),
        float(discount),
        float(gae_lambda),
        advantages,
    )
    return advantages, advantages + np.asarray(values, np.float32)


def whiten(advantages: FloatArray) -> FloatArray:
    """Advantages with mean 0 and variance 1 over all tokens given, float32; equal advantages become zeros.

    Give it the tokens of the whole buffer, never those of one rank or one micro-batch: ranks with easy
    prompts would otherwise count as much as ranks with hard ones.
    """
    if len(advantages) == 0:
        return advantages
    exact = np.asarray(advantages, np.float64)
    centred = exact - exact.mean()
    whitened: FloatArray = (centred / np.sqrt(np.mean(centred**2) + 1e-8)).astype(np.float32)
    return whitened


def explained_variance(values: FloatArray, returns: FloatArray) -> float:
    """Share of the returns' variance that the critic foresaw; 1 is perfect, 0 no better than a constant, NaN
    undefined.

    It is undefined (NaN) when all returns are equal. Below 0 the critic misleads: lower its learning rate.
    """
    spread = float(np.var(np.asarray(returns, np.float64))) if len(returns) else 0.0
    if spread == 0.0:
        return float("nan")
    return 1.0 - float(np.var(np.asarray(returns, np.float64) - np.asarray(values, np.float64))) / spread
