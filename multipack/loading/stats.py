"""What a loader did, in numbers that say how to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from multipack.order.batch import LeftOut


class BatchSize(NamedTuple):
    """What one batch holds, counted where it is made: on the CPU, before any copy to a device."""

    tokens: int
    """Real tokens: `num_tokens` of the batch, else the sum of its attention mask, else all of `input_ids`; 0
    without those."""
    slots: int
    """Token slots that the model computes: the elements of `input_ids`."""
    nbytes: int
    """Bytes of all tensors, each counted once."""


def batch_size(batch: Any) -> BatchSize:
    """Count a batch of any shape; the tensors of nested containers count for the bytes."""
    tensors: dict[int, torch.Tensor] = {}
    _collect(batch, tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
        return BatchSize(0, 0, nbytes)
    slots = batch["input_ids"].numel()
    if isinstance(batch.get("num_tokens"), int):
        return BatchSize(batch["num_tokens"], slots, nbytes)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.numel() == slots:
        return BatchSize(int(mask.sum()), slots, nbytes)
    return BatchSize(slots, slots, nbytes)


def _collect(batch: Any, tensors: dict[int, torch.Tensor]) -> None:
    if isinstance(batch, torch.Tensor):
        tensors[id(batch)] = batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _collect(value, tensors)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            _collect(value, tensors)


@dataclass(slots=True)
class LoaderStats:
    """Totals over all passes since the loader was built or `reset()`. `print(loader.stats)` shows them."""

    batches: int = 0
    """Batches yielded."""
    tokens: int = 0
    """Real tokens yielded, padding not counted."""
    slots: int = 0
    """Token slots yielded, padding counted: what the model computes."""
    bytes: int = 0
    """Bytes of the tensors yielded."""
    bin_slots: int = 0
    """Capacity times bins yielded; 0 where the sampler has no bins."""
    left_out_sequences: int = 0
    """Sequences that finished epochs left out, because of `drop_last` or tail="drop": over all ranks, the
    same on each."""
    left_out_tokens: int = 0
    """Their tokens; 0 where lengths are unknown."""
    start_seconds: float = 0.0
    """Wait for the first batch of each pass, summed: planning, starting threads, reading the first rows. Not
    in `wait_seconds`. Large: let the loader plan earlier, or look at the data set's first reads."""
    wait_seconds: float = 0.0
    """Time the consumer waited for batches after the first of each pass."""
    loop_seconds: float = 0.0
    """Wall time between the first and the last batch of each pass: waiting and the consumer's own work."""
    producer_seconds: float = 0.0
    """Wall time the threads spent making the batches, summed over threads. Near `loop_seconds` times threads:
    they never rested, and more of them may help."""
    queue_length_sum: int = 0
    """Ready batches found at each request, summed."""
    queue_depth: int = 0
    """Batches the queue may hold."""

    @property
    def wait_share(self) -> float:
        """Share of the loop's wall time spent waiting, 0..1. Above 0.01 the loader is the bottleneck: raise
        num_workers."""
        return _ratio(self.wait_seconds, self.loop_seconds)

    @property
    def padding_share(self) -> float:
        """Share of the computed slots that hold no token, 0..1. Above 0.05: pack, or pad to less."""
        return 1.0 - _ratio(self.tokens, self.slots) if self.slots else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the bins' capacity that holds tokens, 0..1, whether or not the rest is computed. Below
        0.95: the sequences pack badly; a larger capacity or window helps. 0 where the sampler has no bins."""
        return _ratio(self.tokens, self.bin_slots)

    @property
    def queue_occupancy(self) -> float:
        """Mean share of the queue that was ready when a batch was asked for, 0..1. Near 1: the consumer is
        the slower one, all is well. Near 0: the loader is, and a deeper queue will not help, only more or
        faster producers."""
        return _ratio(self.queue_length_sum, self.batches * self.queue_depth)

    @property
    def producer_ms(self) -> float:
        """Milliseconds to make one batch. Must stay below the consumer's step time times the number of
        threads."""
        return 1e3 * _ratio(self.producer_seconds, self.batches)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens a second of the whole loop: the speed of training as far as data goes."""
        return _ratio(self.tokens, self.loop_seconds + self.start_seconds)

    def waited(self, asked_at: float, now: float, returned_at: float | None) -> None:
        """Add the wait for one batch, in seconds of one clock; `returned_at` is None for the first one of a
        pass."""
        if returned_at is None:
            self.start_seconds += now - asked_at
        else:
            self.wait_seconds += now - asked_at
            self.loop_seconds += now - returned_at

    def count(
        self, size: BatchSize, bin_slots: int, left_out: LeftOut, queue_length: int, producer_seconds: float
    ) -> None:
        """Add one batch."""
        self.batches += 1
        self.tokens += size.tokens
        self.slots += size.slots
        self.bytes += size.nbytes
        self.bin_slots += bin_slots
        self.left_out_sequences += left_out.sequences
        self.left_out_tokens += left_out.tokens
        self.queue_length_sum += queue_length
        self.producer_seconds += producer_seconds

    def reset(self) -> None:
        """Reset the counts, as after warm-up."""
        for field in fields(self):
            if field.name != "queue_depth":
                setattr(self, field.name, field.default)

    def __str__(self) -> str:
        parts = [f"{self.batches:,} batches, {self.tokens:,} tokens, {self.bytes / 1e6:,.1f} MB"]
        if self.slots:
            parts.append(f"padding {self.padding_share:.2%}")
        if self.bin_slots:
            parts.append(f"bin fill {self.efficiency:.2%}")
        if self.left_out_sequences:
            parts.append(f"left out {self.left_out_sequences:,} sequences, {self.left_out_tokens:,} tokens")
        parts.append(f"waited {self.wait_seconds:.2f} s of {self.loop_seconds:.2f} s ({self.wait_share:.2%})")
        parts.append(f"first batch {self.start_seconds:.2f} s")
        parts.append(f"queue {self.queue_occupancy:.0%} full, {self.producer_ms:.2f} ms to make a batch")
        return " | ".join(parts)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
