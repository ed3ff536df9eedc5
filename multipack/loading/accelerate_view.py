"""What accelerate does with our loaders and samplers, seen from outside.

Nothing here imports it: what is not loaded cannot be listening.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def gradient_state() -> Any:
    """accelerate's GradientState, which knows the loaders being read, if there is an Accelerator in this process."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state:
        return None
    return module.GradientState()


def accelerate_device() -> torch.device:
    """Where an Accelerator, which must exist, wants its batches."""
    device: torch.device = sys.modules["accelerate.state"].PartialState().device
    return device


def check_not_dealt_again(batch_sampler: object, num_replicas: int) -> None:
    """Refuse to be read through accelerate's BatchSamplerShard, which takes every n-th batch of what is a share already.

    accelerate puts it around the batch sampler of any plain loader that it prepares, and asks no one.

    Raises:
        ValueError: a loader that is being read has one around `batch_sampler`, the share of one of several ranks.
    """
    state = gradient_state()
    if state is None or num_replicas == 1:
        return
    for loader in state.dataloader_references:
        shards, reader = 1, getattr(loader, "batch_sampler", None)
        while reader is not None and reader is not batch_sampler:
            shards = max(shards, getattr(reader, "num_processes", 1))
            reader = getattr(reader, "batch_sampler", None)
        if reader is batch_sampler and shards > 1:
            raise ValueError(
                f"these batches are the share of one of {num_replicas} ranks, and accelerate would deal them to {shards} processes once "
                f"more: {shards - 1} of {shards} batches would never be seen. Use multipack.DataLoader, which accelerate leaves as it is, "
                "or give accelerate the MultipackBatchSampler without DistributedBatchSampler."
            )
