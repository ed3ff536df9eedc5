"""Static shapes and alignment through packed_dataloader: one argument reaches planner and collator."""

from __future__ import annotations

import pytest
import torch

from multipack import packed_dataloader

ROWS = [list(range(1, 2 + number % 37)) for number in range(150)]


def test_static_batches_are_planned_and_collated_alike():
    loader = packed_dataloader(
        ROWS,
        64,
        bins_per_batch=2,
        pad_to="capacity",
        max_sequences_per_bin=4,
        static=True,
        num_replicas=3,
        rank=1,
    )
    shapes = {
        str([(name, value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)])
        + str(batch["max_length_q"])
        for _ in range(2)
        for batch in loader
    }
    assert len(shapes) == 1
    batch = next(iter(loader))
    assert batch["cu_seq_lens_q"].shape == (2 * (4 + 1) + 1,)
    assert batch["max_length_q"] == 64


def test_alignment_is_planned_and_collated_alike():
    loader = packed_dataloader(ROWS, 64, align_to=8, num_replicas=1, rank=0)
    batches = list(loader)
    assert sum(batch["num_tokens"] for batch in batches) == sum(map(len, ROWS))
    for batch in batches:
        assert (batch["cu_seq_lens_q"] % 8 == 0).all()
        assert batch["input_ids"].shape[1] <= 64  # planned with unaligned lengths, bins overflow here
    plan = loader.batch_sampler.batch_sampler.plan
    assert plan.num_slots == sum(batch["input_ids"].shape[1] for batch in batches)
    assert len(packed_dataloader(ROWS, 64, num_replicas=1, rank=0)) < len(loader)
    with pytest.raises(ValueError, match="no multiple of align_to = 5"):
        packed_dataloader(ROWS, 64, align_to=5)
