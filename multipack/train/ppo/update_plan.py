"""Which sequences of the buffer an optimizer step takes, and how they fall into micro-batches and ranks.

Pure functions of the buffer's lengths and a seed: every rank computes the whole plan and takes its own
column, so all ranks have the same number of micro-batches and no rank asks another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

from multipack.order.batch import BatchIndices
from multipack.order.micro_batches import split_micro_batches
from multipack.train.ppo.rollouts import IntArray

UpdateMode = Literal["epochs", "steps"]


StepPlan: TypeAlias = list[list[BatchIndices]]
"""Rows of the buffer by micro-step and rank of one optimizer step; those of a repeated batch count for
nothing."""


def num_optimizer_steps(
    buffer_size: int, train_batch_size: int, mode: UpdateMode, num_update_steps: int
) -> int:
    """Optimizer steps of one update phase.

    "epochs": `num_update_steps` passes over the buffer, each in ceil(buffer / batch) steps, the last one
    smaller where it does not divide. "steps": exactly `num_update_steps`.
    """
    if mode == "steps":
        return num_update_steps
    return num_update_steps * -(-buffer_size // train_batch_size)


def step_rows(
    buffer_size: int, train_batch_size: int, mode: UpdateMode, num_update_steps: int, seed: list[int]
) -> Iterator[IntArray]:
    """Rows of the buffer that each optimizer step takes, in turn.

    "epochs" shuffles the buffer again for every pass and takes each row once a pass; "steps" draws each
    step's rows without replacement, so a row may come again in another step or not at all.
    """
    rng = np.random.default_rng(seed)
    for _ in range(num_update_steps):
        order = rng.permutation(buffer_size)
        if mode == "steps":
            yield order[:train_batch_size]
        else:
            yield from (
                order[start : start + train_batch_size] for start in range(0, buffer_size, train_batch_size)
            )


def plan_step(
    lengths: IntArray, rows: IntArray, *, micro_batch_tokens: int, num_replicas: int, hidden_size: int
) -> StepPlan:
    """Spread the sequences of one optimizer step over as few equal rounds of micro-batches as hold them.

    Args:
        lengths: tokens of every sequence of the buffer, each at most `micro_batch_tokens`.
        rows: the sequences of this step, at least one.
        micro_batch_tokens: token slots of a micro-batch of one rank.
        num_replicas: number of ranks.
        hidden_size: of the model; says how much attention adds to the cost of a long sequence.
    """
    split = split_micro_batches(
        lengths[rows], micro_batch_tokens, num_replicas=num_replicas, hidden_size=hidden_size
    )
    return [[_of_rows(rows, batch) for batch in micro_step] for micro_step in split]


def _of_rows(rows: IntArray, batch: BatchIndices) -> BatchIndices:
    """A batch of positions in `rows` as one of rows."""
    return BatchIndices(rows[batch].tolist(), bin_capacity=batch.bin_capacity, repeated=batch.repeated)
