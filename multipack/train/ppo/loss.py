"""The PPO objective of one packed micro-batch, as sums over its action tokens.

Sums, never means: the trainer divides by the action tokens of the whole optimizer step, so the way in which
sequences fall into micro-batches and ranks changes no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PPOLossSums(NamedTuple):
    """Scalars of a micro-batch, all but the last summed over its action tokens; the first three carry
    gradients."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    clipped: Tensor
    """Tokens whose ratio left 1 +- clip_range. Above a third of all tokens the step is too large."""
    value_clipped: Tensor
    divergence: Tensor
    """k3 estimate of the divergence from the policy that sampled to the one in training, nats."""
    largest_log_ratio: Tensor
    """Largest |log ratio| of an action token; 0 without any."""


def ppo_loss_sums(
    *,
    logprobs: Tensor,
    values: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    clip_range: float,
    value_clip_range: float,
) -> PPOLossSums:
    """Clipped policy and value losses (Schulman et al. 2017), summed.

    Args:
        logprobs, values, entropy: of the policy in training, shape [action_tokens], float32.
        old_logprobs, old_values: of the policy that sampled, same shape, no gradient.
        advantages, returns: same shape, no gradient.
        clip_range: the ratio may gain within 1 - clip_range..1 + clip_range.
        value_clip_range: the value may move by this much from the old value before its gain stops counting.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    near_values = old_values + (values - old_values).clamp(-value_clip_range, value_clip_range)
    value = 0.5 * torch.maximum((values - returns) ** 2, (near_values - returns) ** 2)
    with torch.no_grad():
        clipped = ((ratio - 1.0).abs() > clip_range).sum()
        value_clipped = ((values - old_values).abs() > value_clip_range).sum()
        divergence = (torch.expm1(log_ratio) - log_ratio).sum()
        largest = torch.cat([log_ratio.abs(), log_ratio.new_zeros(1)]).max()
    return PPOLossSums(policy.sum(), value.sum(), entropy.sum(), clipped, value_clipped, divergence, largest)
