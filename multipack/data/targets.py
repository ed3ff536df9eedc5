"""How many tokens of a sequence are learnt, by the rule of the collators.

One rule: a sequence's first token is no target, since nothing of its own sequence predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from multipack.data.columns import Columns
from multipack.data.reading import Located, read

IGNORE_INDEX = -100
"""Label of a token that is no target, as in torch's cross-entropy."""
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
"""Columns of one number a token that is zero where the token is no target."""

WithoutTargets = Literal["keep", "drop", "error"]

_SEQUENCES_AT_ONCE = 4096


def targets_of(columns: Columns, located: Located) -> npt.NDArray[np.int64]:
    """Targets of each of these sequences, int64: a pass over the labels, else over the masks. A label a
    sequence is one target."""
    counts = np.zeros(len(located.lengths), np.int64)
    if "labels" in columns.scalars:
        return counts + 1
    labels = columns.tokens.get("labels")
    masks = [] if labels else [column for name, column in columns.tokens.items() if name in MASKS]
    for first in range(0, len(counts), _SEQUENCES_AT_ONCE):
        here = slice(first, first + _SEQUENCES_AT_ONCE)
        starts = None if located.starts is None else located.starts[here]
        block = Located(located.rows[here], starts, located.lengths[here])
        counts[here] = count_targets(
            None if labels is None else read(labels, block).numpy(),
            [read(mask, block).numpy() for mask in masks],
            block.lengths,
        )
    return counts


def count_targets(
    labels: npt.NDArray[Any] | None, masks: Sequence[npt.NDArray[Any]], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Targets of each of several sequences that lie one after the other.

    Args:
        labels: labels of all their tokens, shape [sum of lengths]; None: every token is a target.
        masks: further columns of that shape; a token is a target where all of them are nonzero.
        lengths: tokens of each sequence, int64, all at least 1.

    Returns:
        int64, shape [len(lengths)].
    """
    total = int(lengths.sum())
    learnt = np.ones(total, np.bool_) if labels is None else labels != IGNORE_INDEX
    for mask in masks:
        learnt &= mask != 0
    starts = np.cumsum(lengths) - lengths
    learnt[starts] = False
    return np.add.reduceat(learnt, starts, dtype=np.int64) if len(lengths) else np.zeros(0, np.int64)
