"""The buffer as packed micro-batches: multipack's own data set, collator and loader over experience."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.integrations.attention import model_inputs
from multipack.loading.loader import DataLoader
from multipack.order.orders import BatchOrder
from multipack.order.sampler import DistributedBatchSampler
from multipack.train.loss import IGNORE_INDEX, predicting_positions
from multipack.train.ppo.advantage import FloatArray
from multipack.train.ppo.rollouts import Rollouts, offsets_of
from multipack.train.ppo.update_plan import StepPlan


class Actions(NamedTuple):
    """The action tokens of a packed micro-batch."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    positions: Tensor
    """int64 [action_tokens], where each action is predicted from."""
    tokens: Tensor
    """int64 [action_tokens], the actions."""


def as_dataset(rollouts: Rollouts, of_actions: Mapping[str, FloatArray]) -> TokenDataset:
    """One sequence a rollout: `input_ids`, `labels` at its action tokens, and a column for each array over
    action tokens.

    Args:
        of_actions: arrays of shape [sum of response lengths]; prompt tokens get 0.
    """
    actions = rollouts.action_mask
    labels = np.where(actions, rollouts.tokens, np.int32(IGNORE_INDEX))
    columns: dict[str, Any] = {"input_ids": rollouts.tokens, "labels": labels}
    for name, values in of_actions.items():
        columns[name] = np.zeros(len(actions), np.float32)
        columns[name][actions] = values
    offsets = pa.array(offsets_of(rollouts.lengths))
    arrays = [pa.LargeListArray.from_arrays(offsets, pa.array(values)) for values in columns.values()]
    return TokenDataset(pa.Table.from_arrays(arrays, names=list(columns)))


def micro_batches(
    dataset: TokenDataset, plans: Iterable[StepPlan], rank: int, num_workers: int, device: torch.device
) -> DataLoader[dict[str, Any]]:
    """This rank's micro-batches of consecutive optimizer steps, collated ahead in the background."""
    batches = [micro_step[rank] for plan in plans for micro_step in plan]
    return DataLoader(
        dataset,
        batch_sampler=DistributedBatchSampler(BatchOrder(batches), num_replicas=1, rank=0),
        collate_fn=PackedCollator(),
        num_workers=num_workers,
        device=device,
    )


def actions_of(batch: Mapping[str, Any]) -> Actions:
    """What the networks are asked about a packed micro-batch; a repeated one has no action."""
    positions = predicting_positions(batch["labels"][0], batch["num_target_tokens"])
    return Actions(model_inputs(batch), positions, batch["labels"][0, positions + 1])
