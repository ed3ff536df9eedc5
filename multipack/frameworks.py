"""What accelerate, Lightning and torch look for on samplers and loaders, so that none shards our batches
again, or not at all.

No framework is imported here: accelerate is looked up in `sys.modules`; if it is not loaded, nothing needs
telling.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler

from multipack.distributed import rank_and_world_size


class EpochForwarder:
    """What frameworks find under `batch_sampler.sampler`: it passes `set_epoch` on."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler."""
        self._batch_sampler.set_epoch(epoch)


class RankSampler(DistributedSampler[Any]):
    """What Lightning finds under `loader.sampler` of a loader whose batch sampler shards by rank.

    Lightning replaces samplers that are no DistributedSampler. `set_epoch` is passed on.
    """

    def __init__(self, batch_sampler: Any, dataset: Any) -> None:
        super().__init__(dataset, batch_sampler.num_replicas, batch_sampler.rank, shuffle=False)
        self._batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[int]:
        """The row ids of this rank's batches. Does not advance the sampler."""
        return chain.from_iterable(self._batch_sampler.read())

    def set_epoch(self, epoch: int) -> None:
        self._batch_sampler.set_epoch(epoch)


def refuse_rebuilding(cls: type, arguments: dict[str, Any]) -> None:
    """Refuse Lightning, which rebuilds the batch sampler of a plain torch loader as type(it)(a sampler of its
    own, batch_size=...).

    Raises:
        TypeError: `batch_size` is among the arguments; names the remedies.
    """
    if "batch_size" in arguments:
        raise TypeError(
            f"{cls.__name__} has no batch_size: its batches are bins, and no framework can rebuild it around "
            "another sampler. Under Lightning use PackedDataModule, multipack.DataLoader over "
            "DistributedBatchSampler, or Trainer(use_distributed_sampler=False)."
        )


def is_dealt_to_ranks(loader: TorchDataLoader[Any]) -> bool:
    """Whether the batches of a loader are this rank's own share, by our sampler or stream or by torch's
    sampler. One share for all of several ranks does not count."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    dealers: tuple[Any, ...] = (loader.dataset, loader.batch_sampler, loader.sampler, inner)
    for dealer in dealers:
        if isinstance(dealer, DistributedSampler) or _deals(dealer):
            num_replicas: int = dealer.num_replicas
            if getattr(getattr(dealer, "ranks", None), "members", None) is not None:
                return True  # a mesh or a group said which ranks take shares
            return num_replicas > 1 or rank_and_world_size()[1] == 1
    return False


def check_dealt(loader: TorchDataLoader[Any]) -> None:
    """Refuse to pack for all ranks and give every rank all of it.

    Raises:
        ValueError: the batch sampler knows nothing of ranks, but there are several.
    """
    if _deals(loader.batch_sampler) is False:
        num_replicas = rank_and_world_size()[1]
        if num_replicas > 1:
            raise ValueError(
                f"each of {num_replicas} ranks would get the same batches, since MultipackBatchSampler knows "
                "nothing of ranks. Wrap it in DistributedBatchSampler, or prepare the loader by accelerate; "
                "where each rank is to have them all, say so: DistributedBatchSampler(batch_sampler, "
                "num_replicas=1, rank=0)."
            )


def _deals(source: Any) -> bool | None:
    """Whether a source of ours shards by rank; None of anything else."""
    deals = getattr(type(source), "deals_to_ranks", None)
    return deals if isinstance(deals, bool) else None


def check_not_dealt_again(batch_sampler: object, num_replicas: int) -> None:
    """Refuse to be read through accelerate's BatchSamplerShard, which takes every n-th batch of what is a
    share already.

    accelerate puts it around the batch sampler of any plain loader that it prepares.

    Raises:
        ValueError: a loader that is being read has one around `batch_sampler`, the share of one of several
            ranks.
    """
    state = _gradient_state()
    if state is None or num_replicas == 1:
        return
    for loader in state.dataloader_references:
        shards, reader = 1, getattr(loader, "batch_sampler", None)
        while reader is not None and reader is not batch_sampler:
            shards = max(shards, getattr(reader, "num_processes", 1))
            reader = getattr(reader, "batch_sampler", None)
        if reader is batch_sampler and shards > 1:
            raise ValueError(
                f"these batches are the share of one of {num_replicas} ranks, and accelerate would shard "
                f"them over {shards} processes again: {shards - 1} of {shards} batches would never be seen. "
                "Use multipack.DataLoader, which accelerate leaves as it is, or give accelerate the "
                "MultipackBatchSampler without DistributedBatchSampler."
            )


def accelerate_device() -> torch.device:
    """Where an Accelerator, which must exist, wants its batches."""
    device: torch.device = sys.modules["accelerate.state"].PartialState().device
    return device


class AccelerateListener:
    """Tells accelerate which loader is read and which batch is its last, as accelerate's own loaders do.

    It synchronises gradients at `end_of_dataloader`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._leave: Callable[[], object] | None = None

    @property
    def listens(self) -> bool:
        """Whether accelerate wants to know the last batch."""
        return self._leave is not None

    def began(self, iterator: object) -> None:
        """A pass begins; it ends with its iterator at the latest."""
        state = _gradient_state() if is_dealt_to_ranks(self._loader) else None
        if state is None or self._leave is not None:
            return
        self._loader.end_of_dataloader = False
        state._add_dataloader(self._loader)
        leave = weakref.finalize(iterator, state._remove_dataloader, self._loader)
        leave.atexit = False
        self._leave = leave

    def yielded(self, is_last: bool) -> None:
        """A batch is about to be yielded."""
        if self.listens:
            self._loader.end_of_dataloader = is_last

    def ended(self) -> None:
        """The pass ended or was closed."""
        if self._leave is not None:
            self._leave()


def _gradient_state() -> Any:
    """accelerate's GradientState, which knows the loaders being read, if there is an Accelerator in this
    process."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state:
        return None
    return module.GradientState()
