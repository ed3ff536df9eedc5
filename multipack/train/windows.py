"""From prepared tokens to the windows of batches that optimizer steps take.

Everything about order, ranks and tails is multipack's samplers; here they are put together as the
configuration says, and their exact lengths are turned into a number of optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.order.orders import RowOrder
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.train.config import TrainConfig


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step on this rank."""

    batches: list[dict[str, Any]]
    epoch: float
    """Passes over the data done once this window is, in fractions."""
    ends_epoch: bool
    wait_seconds: float
    """Time spent waiting for the batches."""


def training_loader(
    config: TrainConfig, tokens: TokenDataset, *, pad_token_id: int, hidden_size: int, device: torch.device
) -> DataLoader[Any]:
    """Shuffled micro-batches of this rank.

    Raises:
        ValueError: some rank would have no batch; names the numbers and what works.
    """
    sampler = DistributedBatchSampler(
        _shuffled(config, tokens),
        tail=config.tail,
        accumulate=config.gradient_accumulation_steps,
        balance=config.balance,
        hidden_size=hidden_size,
    )
    return _loader(config, tokens, sampler, pad_token_id, device)


def validation_loader(
    config: TrainConfig, tokens: TokenDataset, *, pad_token_id: int, device: torch.device
) -> DataLoader[Any]:
    """Every validation row once over all ranks, in order; ranks without one repeat some with no target."""
    if config.sample_packing:
        ordered: MultipackBatchSampler | RowOrder = MultipackBatchSampler(
            tokens.lengths,
            config.sequence_len,
            bins_per_batch=config.micro_batch_size,
            max_sequences_per_bin=config.max_sequences_per_bin,
            shuffle=False,
        )
    else:
        ordered = RowOrder(len(tokens), config.micro_batch_size, shuffle=False)
    sampler = DistributedBatchSampler(ordered, tail="split")
    return _loader(config, tokens, sampler, pad_token_id, device)


def _shuffled(config: TrainConfig, tokens: TokenDataset) -> MultipackBatchSampler | RowOrder:
    if config.sample_packing:
        return MultipackBatchSampler(
            tokens.lengths,
            config.sequence_len,
            bins_per_batch=config.micro_batch_size,
            seed=config.seed,
            method=config.pack_method,
            max_sequences_per_bin=config.max_sequences_per_bin,
        )
    return RowOrder(len(tokens), config.micro_batch_size, seed=config.seed)


def _loader(
    config: TrainConfig,
    tokens: TokenDataset,
    sampler: DistributedBatchSampler,
    pad_token_id: int,
    device: torch.device,
) -> DataLoader[Any]:
    collator: PackedCollator | PaddedCollator
    if config.sample_packing:
        collator = PackedCollator(
            pad_to="capacity" if config.pad_to_sequence_len else None,
            static=config.pad_to_sequence_len and config.max_sequences_per_bin is not None,
            max_sequences_per_bin=config.max_sequences_per_bin,
            bins_per_batch=config.micro_batch_size,
            pad_token_id=pad_token_id,
            return_indices=config.log_rows,
        )
    else:
        collator = PaddedCollator(pad_token_id=pad_token_id, return_indices=config.log_rows)
    return DataLoader(
        tokens,
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=config.num_workers,
        prefetch_batches=config.prefetch_batches,
        device=device,
    )


def epoch_steps(sampler: DistributedBatchSampler, config: TrainConfig) -> list[int]:
    """Optimizer steps of each epoch from its start, exact; only as many epochs as `max_steps` needs."""
    steps: list[int] = []
    for epoch in range(config.num_epochs):
        steps.append(_windows_of(sampler.num_batches(epoch), config))
        if config.max_steps is not None and sum(steps) >= config.max_steps:
            break
    return steps


def steps_left(sampler: DistributedBatchSampler, steps_of_epochs: list[int], config: TrainConfig) -> int:
    """Optimizer steps from the sampler's position to the end of the last epoch."""
    if sampler.epoch >= config.num_epochs:
        return 0
    return _windows_of(sampler.remaining, config) + sum(steps_of_epochs[sampler.epoch + 1 :])


def windows(loader: DataLoader[Any], config: TrainConfig) -> Iterator[Window]:
    """The optimizer steps from the sampler's position to the end of the last epoch, never across an epoch's
    end."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, DistributedBatchSampler)
    while (epoch := sampler.epoch) < config.num_epochs:
        left, whole = sampler.remaining, len(sampler)
        batches = iter(loader)
        while left:
            started = time.perf_counter()
            window = list(islice(batches, config.gradient_accumulation_steps))
            waited = time.perf_counter() - started
            left -= len(window)
            yield Window(window, epoch + 1 - left / whole, left == 0, waited)
            del window  # freeing it later would be taken for waiting
        assert next(batches, None) is None


def _windows_of(micro_steps: int, config: TrainConfig) -> int:
    return -(-micro_steps // config.gradient_accumulation_steps)
