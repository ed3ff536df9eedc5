"""From prepared tokens to the windows of batches that optimizer steps take.

Everything about order, ranks and tails is multipack's samplers; here they are put together as the configuration says, and
their exact lengths are turned into a number of optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.dataset import Selection, TokenDataset
from multipack.loading.loader import DataLoader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.train.config import TrainConfig


@dataclass(frozen=True)
class CountingCollator:
    """The collator's batch, with what of it counts.

    Beside the collator's own keys a batch has `num_bin_slots`, the room of its bins in token slots; and a batch that only repeats
    rows to even out the ranks has 0 sequences and 0 tokens.
    """

    collator: PackedCollator | PaddedCollator
    bin_capacity: int | None
    """Token slots of a bin; None where rows are padded and the batch is its own room."""

    def __call__(self, selection: Selection) -> dict[str, Any]:
        batch = self.collator(selection)
        batch["num_slots"] = batch["input_ids"].numel()
        bins = len(selection.bin_offsets) - 1
        batch["num_bin_slots"] = batch["num_slots"] if self.bin_capacity is None else bins * self.bin_capacity
        if selection.repeated:
            batch["num_sequences"] = batch["num_tokens"] = 0
        return batch


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
        ordered: Any = MultipackBatchSampler(
            tokens.lengths, config.sequence_len, bins_per_batch=config.micro_batch_size, shuffle=False
        )
    else:
        ordered = BatchSampler(range(len(tokens)), config.micro_batch_size, drop_last=False)
    sampler = DistributedBatchSampler(ordered, tail="split")
    return _loader(config, tokens, sampler, pad_token_id, device)


def _shuffled(config: TrainConfig, tokens: TokenDataset) -> Any:
    if config.sample_packing:
        return MultipackBatchSampler(
            tokens.lengths,
            config.sequence_len,
            bins_per_batch=config.micro_batch_size,
            seed=config.seed,
            method=config.pack_method,
        )
    rows: DistributedSampler[Any] = DistributedSampler(
        tokens, num_replicas=1, rank=0, shuffle=True, seed=config.seed
    )
    return BatchSampler(rows, config.micro_batch_size, drop_last=False)


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
            capacity=config.sequence_len,
            pad_to="capacity" if config.pad_to_sequence_len else None,
            pad_token_id=pad_token_id,
            return_indices=config.log_rows,
        )
    else:
        collator = PaddedCollator(pad_token_id=pad_token_id, return_indices=config.log_rows)
    return DataLoader(
        tokens,
        batch_sampler=sampler,
        collate_fn=CountingCollator(collator, config.sequence_len if config.sample_packing else None),
        num_workers=config.num_workers,
        prefetch_batches=config.prefetch_batches,
        device=device,
    )


def epoch_steps(sampler: DistributedBatchSampler, config: TrainConfig) -> list[int]:
    """Optimizer steps of each epoch from its start, exact; only as many epochs as `max_steps` needs. Rewinds the sampler."""
    steps: list[int] = []
    for epoch in range(config.num_epochs):
        sampler.set_epoch(epoch)
        steps.append(_windows_of(len(sampler), config))
        if config.max_steps is not None and sum(steps) >= config.max_steps:
            break
    sampler.set_epoch(0)
    return steps


def steps_left(sampler: DistributedBatchSampler, steps_of_epochs: list[int], config: TrainConfig) -> int:
    """Optimizer steps from the sampler's position to the end of the last epoch."""
    if sampler.epoch >= config.num_epochs:
        return 0
    return _windows_of(sampler.remaining, config) + sum(steps_of_epochs[sampler.epoch + 1 :])


def windows(loader: DataLoader[Any], config: TrainConfig) -> Iterator[Window]:
    """The optimizer steps from the sampler's position to the end of the last epoch, never across an epoch's end."""
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
