"""Cross-entropy summed over target tokens.

The one rule: nothing here takes a mean. A mean over a micro-batch gives its tokens another weight than those
of the next one; the engine divides by the target tokens of the whole optimizer step, over all ranks, and by
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multipack.integrations.attention import model_inputs

IGNORE_INDEX = -100

_ROWS_PER_CHUNK = 8192
"""Logits that are widened to float32 at once: 1 GB for a vocabulary of 32,000, whatever the batch."""


def causal_lm_loss_sum(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Sum of the next-token losses of a batch over its target tokens, a float32 scalar.

    Only positions that predict a target go through the output layer, which for completions is a fraction of
    them. A batch without any target gives 0 with zero gradients, so its rank still takes part in the step.

    Args:
        batch: from `PackedCollator` or `PaddedCollator`; label t is predicted from the tokens before t of its
            row.
    """
    labels = batch["labels"]
    if "loss_weights" in batch:
        raise ValueError(
            "the batch has loss_weights, which this sum over targets would ignore. Collate without "
            "loss_weights, or weigh the losses of the tokens in a loop of one's own, see optimizer_steps."
        )
    if labels.shape[0] > 1:
        logits = model(**model_inputs(batch)).logits[:, :-1]
        predicts = labels[:, 1:] != IGNORE_INDEX
        return cross_entropy_sum(logits[predicts], labels[:, 1:][predicts])
    positions = predicting_positions(labels[0], batch["num_target_tokens"])
    logits = model(**model_inputs(batch), logits_to_keep=positions).logits
    return cross_entropy_sum(logits[0], labels[0, positions + 1])


def predicting_positions(labels: Tensor, num_targets: int) -> Tensor:
    """Positions whose next token is a target, int64 [num_targets], found without waiting for the device.

    Args:
        labels: int64 [tokens]; the first one is never a target, since nothing stands before it.
        num_targets: how many labels differ from -100, as the collator counted.
    """
    return torch.nonzero_static(labels[1:] != IGNORE_INDEX, size=num_targets)[:, 0]


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies, float32, whatever the dtype of `logits` [tokens, vocabulary]."""
    if len(targets) <= _ROWS_PER_CHUNK:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    chunks = zip(torch.split(logits, _ROWS_PER_CHUNK), torch.split(targets, _ROWS_PER_CHUNK), strict=True)
    sums: list[Tensor] = [checkpoint(_chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()


def _chunk_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")
