"""How much each target of a batch counts in the loss.

The one rule: weights are not normalised here. A batch does not know the other micro-batches and ranks of its
optimizer step, so the sum of the weights goes with it, and the loss is divided by the sum over the whole
step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def add_loss_weights(
    batch: dict[str, Any], kind: str, places: npt.NDArray[np.int64], ignore_index: int
) -> None:
    """Add `loss_weights`, float32 in the shape of `labels` and 0 where there is no target, and
    `sum_loss_weights`, a float.

    Args:
        batch: with its labels, and the column that `kind` names.
        kind: "tokens": each target counts 1. "sequences": each sequence counts 1, its targets alike. Else a
            column of weights, one a token or one a sequence.
        places: first slot of each sequence, ascending, int64 [num_sequences].
        ignore_index: label of slots that are no target.

    Raises:
        ValueError: labels are one a sequence, the column is missing or holds no numbers, or a weight of a
            target is negative or not finite.
    """
    labels = batch["labels"]
    if labels.shape != batch["input_ids"].shape:
        raise ValueError(
            f"loss_weights={kind!r} weighs tokens, but labels of shape {tuple(labels.shape)} are one a "
            "sequence: leave it out, and weigh the losses of the sequences."
        )
    targets = np.flatnonzero(labels.numpy() != ignore_index)
    sequences = np.searchsorted(places, targets, side="right") - 1
    weights = np.zeros(labels.numel(), np.float32)
    weights[targets] = found = _weights_of(batch, kind, targets, sequences)
    wrong = ~(np.isfinite(found) & (found >= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"column {kind!r} gives a target of sequence {int(sequences[at])} of the batch the weight "
            f"{found[at]}: the loss would be undefined or pushed up. Weights are finite and at least 0."
        )
    batch["loss_weights"] = torch.from_numpy(weights).view(labels.shape)
    batch["sum_loss_weights"] = float(weights.sum(dtype=np.float64))


def _weights_of(
    batch: dict[str, Any], kind: str, targets: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    if kind == "tokens":
        return np.ones(len(targets))
    if kind == "sequences":
        return 1 / np.bincount(sequences)[sequences]
    column = batch.get(kind)
    if not torch.is_tensor(column):
        raise ValueError(
            f"loss_weights={kind!r} is neither 'sequences' nor 'tokens' nor a column of numbers of the data "
            "set: name one that it reads, see columns= of TokenDataset."
        )
    per_token = column.shape == batch["input_ids"].shape
    found: npt.NDArray[np.float64] = (
        column.flatten().numpy()[targets if per_token else sequences].astype(np.float64)
    )
    return found
