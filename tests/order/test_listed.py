"""Batch samplers that are not ours: whether a number names a place in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from multipack import DistributedBatchSampler

ROWS: Any = range(8)


class Seeded(RandomSampler):
    """Has a generator, but seeds it with the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(epoch)


@pytest.mark.parametrize(
    ("sampler", "resumable"),
    [
        (SequentialSampler(ROWS), True),
        (DistributedSampler(ROWS, num_replicas=1, rank=0), True),
        (RandomSampler(ROWS, generator=torch.Generator()), False),
        (Seeded(ROWS, generator=torch.Generator()), True),
    ],
)
def test_an_order_that_follows_the_epoch_can_be_resumed(sampler, resumable):
    dealt = DistributedBatchSampler(BatchSampler(sampler, 2, drop_last=False), num_replicas=1, rank=0)
    assert dealt.is_resumable is resumable
