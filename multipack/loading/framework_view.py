"""What frameworks look for on a loader, so that none deals our batches to ranks once more, or not at all.

What accelerate alone looks for is in `accelerate_view`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from multipack.distributed import rank_and_world_size
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.stream import StreamPacker


class RankSampler(DistributedSampler[Any]):
    """Stands under `loader.sampler` of a loader whose batch sampler deals to ranks. Lightning replaces samplers that are no
    DistributedSampler, and finds here that the rows are dealt already; `set_epoch` is passed on."""

    def __init__(self, batch_sampler: DistributedBatchSampler, dataset: Any) -> None:
        super().__init__(dataset, batch_sampler.num_replicas, batch_sampler.rank, shuffle=False)
        self._batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[int]:
        """The row ids of this rank's batches. Reading them moves nobody's place."""
        return chain.from_iterable(copy.copy(self._batch_sampler).begin())

    def set_epoch(self, epoch: int) -> None:
        self._batch_sampler.set_epoch(epoch)


def is_dealt_to_ranks(loader: torch.utils.data.DataLoader[Any]) -> bool:
    """Whether the batches of a loader are this rank's own share, by our sampler or stream or by torch's sampler. One share for
    all of several ranks does not count."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for dealer in (loader.dataset, loader.batch_sampler, loader.sampler, inner):
        if isinstance(dealer, StreamPacker | DistributedBatchSampler | DistributedSampler):
            return dealer.num_replicas > 1 or rank_and_world_size()[1] == 1
    return False


def check_dealt(loader: torch.utils.data.DataLoader[Any]) -> None:
    """Refuse to pack for all ranks and give every rank all of it.

    Raises:
        ValueError: the batch sampler knows nothing of ranks, but there are several.
    """
    if isinstance(loader.batch_sampler, MultipackBatchSampler):
        num_replicas = rank_and_world_size()[1]
        if num_replicas > 1:
            raise ValueError(
                f"every one of {num_replicas} ranks would get the same batches, since MultipackBatchSampler knows nothing of ranks. "
                "Wrap it in DistributedBatchSampler, or prepare the loader by accelerate; where each rank is to have them all, "
                "say so: DistributedBatchSampler(batch_sampler, num_replicas=1, rank=0)."
            )
