"""How far the policy has moved from the reference, and the penalty for it.

k1, the plain difference of log-probabilities, is the penalty inside the reward: its expectation is the exact
divergence. k3 is what a person reads: never negative and far less noisy (Schulman 2020, "Approximating KL
divergence").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from multipack.train.ppo.advantage import FloatArray


def k1(logprobs: FloatArray, reference_logprobs: FloatArray) -> FloatArray:
    """Divergence of each sampled token, unbiased and of either sign; shape [action_tokens], nats."""
    return logprobs - reference_logprobs


def k3(logprobs: FloatArray, reference_logprobs: FloatArray) -> FloatArray:
    """Divergence of each sampled token, unbiased and never negative; shape [action_tokens], nats."""
    log_ratio = reference_logprobs - logprobs
    estimate: FloatArray = np.expm1(log_ratio) - log_ratio
    return estimate


@dataclass
class KLController:
    """The coefficient of the penalty: fixed, or steered towards a divergence (Ziegler et al. 2019, section
    2.2)."""

    coefficient: float
    target: float | None = None
    """Divergence a response (sum over its tokens, nats) to steer to; None keeps the coefficient fixed."""
    horizon: int = 10_000
    """Sequences over which the coefficient may change by the factor e at the largest error."""

    def update(self, divergence: float, num_sequences: int) -> None:
        """Steer after `num_sequences` sequences with a mean divergence of `divergence` nats each.

        Raises:
            ValueError: the divergence is not finite; the coefficient would stay NaN for the rest of the run.
        """
        if not math.isfinite(divergence):
            raise ValueError(
                f"A divergence of {divergence} would make the KL coefficient useless for good: "
                "the policy has broken down, lower the learning rate."
            )
        if self.target is None:
            return
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * num_sequences / self.horizon
