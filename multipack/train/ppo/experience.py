"""Advantages and returns of a buffer.

Computed from the whole buffer on every rank alike, so whitening is over all ranks without a collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from multipack.data.dataset import TokenDataset
from multipack.train.ppo.advantage import FloatArray, explained_variance, generalized_advantages, whiten
from multipack.train.ppo.buffer import as_dataset
from multipack.train.ppo.kl import k1, k3
from multipack.train.ppo.rollouts import Rollouts
from multipack.train.ppo.scoring import BufferScores


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A scored buffer; arrays over its action tokens, float32."""

    rollouts: Rollouts
    scores: BufferScores
    advantages: FloatArray
    """Whitened over the buffer; all 0 where the rewards have no spread."""
    returns: FloatArray
    """Targets of the critic."""
    has_spread: bool
    """Whether some rewards differ. If none do, no response is better than another: the policy must not
    move."""

    def dataset(self) -> TokenDataset:
        """The buffer with all that the loss needs, for the collator."""
        return as_dataset(
            self.rollouts,
            {
                "old_logprobs": self.scores.logprobs,
                "old_values": self.scores.values,
                "advantages": self.advantages,
                "returns": self.returns,
            },
        )

    @property
    def divergence(self) -> float:
        """k3 divergence from the reference, nats a response, mean over responses; what `kl_target` speaks
        of."""
        return self._a_response(k3(self.scores.logprobs, self.scores.reference_logprobs))

    def metrics(self) -> dict[str, float]:
        """The buffer in numbers."""
        rollouts = self.rollouts
        return {
            "reward": float(rollouts.sequence_rewards.mean(dtype=np.float64)),
            "reward_std": float(rollouts.sequence_rewards.std(dtype=np.float64)),
            "kl": self.divergence,
            "kl_k1": self._a_response(k1(self.scores.logprobs, self.scores.reference_logprobs)),
            "entropy": _mean(self.scores.entropy),
            "explained_variance": explained_variance(self.scores.values, self.returns),
            "value_mean": _mean(self.scores.values),
            "return_mean": _mean(self.returns),
            "prompt_tokens": float(rollouts.prompt_lengths.mean()),
            "response_tokens": float(rollouts.response_lengths.mean()),
            "finished_share": float(rollouts.finished.mean()),
            "mismatch_kl": _mean(k3(rollouts.sampling_logprobs, self.scores.logprobs)),
            "mismatch_max": float(np.abs(rollouts.sampling_logprobs - self.scores.logprobs).max()),
            "num_rollouts": float(len(rollouts)),
        }

    def _a_response(self, of_tokens: FloatArray) -> float:
        return float(of_tokens.sum(dtype=np.float64) / len(self.rollouts))


def learn_from(
    rollouts: Rollouts, scores: BufferScores, *, kl_coef: float, discount: float, gae_lambda: float
) -> Experience:
    """Take the KL penalty from the rewards, estimate advantages, whiten them.

    Rewards that are all equal rank no response above another. Advantages would then hold the critic's errors
    alone, which whitening would scale up to the strength of a real signal, so they are set to 0.

    Raises:
        ValueError: no response has a token, so that there is nothing to learn from.
    """
    if len(rollouts.rewards) == 0:
        raise ValueError(f"None of {len(rollouts)} responses has a token: there is no action to learn from.")
    rewards = rollouts.rewards - np.float32(kl_coef) * k1(scores.logprobs, scores.reference_logprobs)
    advantages, returns = generalized_advantages(
        rewards, scores.values, rollouts.action_offsets, discount=discount, gae_lambda=gae_lambda
    )
    spread = rewards_have_spread(rollouts)
    return Experience(
        rollouts=rollouts,
        scores=scores,
        advantages=whiten(advantages) if spread else np.zeros_like(advantages),
        returns=returns,
        has_spread=spread,
    )


def rewards_have_spread(rollouts: Rollouts) -> bool:
    """Whether the rewards tell some actions from others, apart from rounding.

    Rewards of single tokens count too: equal sums may come from different tokens. One response alone is never
    without
    spread: nothing says what others would have earned.
    """
    if len(rollouts) < 2 or _spread(rollouts.sequence_rewards):
        return True
    lengths = rollouts.response_lengths
    inner = np.ones(len(rollouts.rewards), np.bool_)
    inner[(rollouts.action_offsets[1:] - 1)[lengths > 0]] = (
        False  # the last token has the reward of the sequence
    )
    return _spread(rollouts.rewards[inner])


def _spread(values: FloatArray) -> bool:
    """Whether values differ by more than the rounding of float32."""
    if len(values) == 0:
        return False
    return float(np.ptp(values)) > 1e-6 * float(np.abs(values).max())


def _mean(values: FloatArray) -> float:
    return float(values.mean(dtype=np.float64))
