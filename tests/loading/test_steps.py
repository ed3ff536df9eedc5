"""Optimizer steps: as many micro-batches as asked for, never across an epoch, with the targets of all of
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loader_cases import token_rows
from torch.utils.data import DataLoader as TorchDataLoader

from multipack import DataLoader, optimizer_steps, packed_dataloader


def test_steps_hold_accumulate_micro_batches_and_end_with_the_epoch() -> None:
    loader = packed_dataloader(token_rows(), 256, accumulate=4, rank=0, num_replicas=1)
    for _ in range(2):
        num_batches = len(loader)
        steps = list(optimizer_steps(loader))
        assert [len(step) for step in steps[:-1]] == [4] * (len(steps) - 1)
        assert sum(map(len, steps)) == num_batches
        assert len(steps[-1]) == (num_batches - 1) % 4 + 1


def test_a_loss_divided_by_it_is_the_mean_over_the_targets_of_the_step() -> None:
    # Rows of 2 to 60 tokens have one target less each; every target has the loss of its token.
    loader = packed_dataloader(token_rows(), 256, accumulate=3, rank=0, num_replicas=1)
    for step in optimizer_steps(loader):
        losses = [batch["input_ids"][batch["labels"] != -100].double() for batch in step]
        expected = torch.cat(losses).mean()
        assert step.num_target_tokens == sum(map(len, losses))
        assert torch.isclose(sum(loss.sum() / step.loss_divisor for loss in losses), expected)


def test_a_step_of_repeats_alone_divides_by_one() -> None:
    loader = packed_dataloader([[1], [2]], 4, rank=0, num_replicas=1)  # a row of one token has no target
    assert [step.num_target_tokens for step in optimizer_steps(loader)] == [1]


def test_breaking_off_a_step_loses_no_place() -> None:
    loader = packed_dataloader(token_rows(), 256, accumulate=4, rank=0, num_replicas=1)
    next(iter(optimizer_steps(loader)))
    assert loader.state_dict()["sampler"]["batches"] == 4


@pytest.mark.parametrize("loader", [DataLoader(range(4)), TorchDataLoader(range(4))])
def test_other_loaders_are_refused(loader: Any) -> None:
    with pytest.raises(TypeError, match="DistributedBatchSampler"):
        next(optimizer_steps(loader))


def test_several_ranks_without_a_process_group_are_refused() -> None:
    loader = packed_dataloader((np.ones(90, np.int32), np.arange(0, 91, 3)), 6, rank=0, num_replicas=2)
    with pytest.raises(RuntimeError, match="init_process_group"):
        next(optimizer_steps(loader))
