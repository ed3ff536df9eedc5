"""The micro-batches of an optimizer step, with what its loss is divided by.

The one rule: the loss of a step is the sum over its target tokens, divided by the target tokens of the whole
step over all its micro-batches and ranks. A mean over a micro-batch would give its tokens another weight than
those of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from multipack.loading.loader import DataLoader
from multipack.order.sampler import DistributedBatchSampler

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class OptimizerStep(Sequence[dict[str, Any]]):
    """This rank's micro-batches of one optimizer step."""

    batches: Sequence[dict[str, Any]]
    num_target_tokens: int
    """Target tokens of the step, over all micro-batches and ranks; at least 1, so that it may divide."""
    num_replicas: int
    """Ranks that share the step. DistributedDataParallel and FSDP average gradients over them, so a loss that
    is divided by `num_target_tokens / num_replicas` gives the gradient of the mean over all target tokens."""

    sum_loss_weights: float | None = None
    """Sum of the `loss_weights` of the step, over all micro-batches and ranks; None where batches have
    none."""

    @property
    def loss_divisor(self) -> float:
        """What each micro-batch's summed loss is divided by where gradients are averaged over ranks. With
        `loss_weights` the losses are summed with them, and their sum takes the place of the number of target
        tokens; 1 where it is 0."""
        whole = self.num_target_tokens if self.sum_loss_weights is None else self.sum_loss_weights or 1.0
        return whole / self.num_replicas

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index]


def optimizer_steps(loader: DataLoader[dict[str, Any]]) -> Iterator[OptimizerStep]:
    """The optimizer steps of one pass over a loader; all ranks together, since they add up their target
    tokens.

    The last step of an epoch may have fewer micro-batches; none reaches into the next epoch. The number of
    micro-batches is the `accumulate` of the loader's DistributedBatchSampler.

    ```
    for step in optimizer_steps(loader):
        for batch in step:
            loss = model(**model_inputs(batch), labels=batch["labels"], num_items_in_batch=step.loss_divisor).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ```

    Raises:
        TypeError: the loader's batch sampler is no DistributedBatchSampler.
    """
    sampler = loader.batch_sampler
    if not isinstance(sampler, DistributedBatchSampler):
        raise TypeError(
            "optimizer_steps needs a loader over DistributedBatchSampler, which knows `accumulate`, not "
            f"{type(sampler).__qualname__}."
        )
    batches = iter(loader)
    while micro_batches := list(islice(batches, sampler.accumulate)):
        shares = sampler.num_replicas
        targets = _sum_over_shares(sum(batch["num_target_tokens"] for batch in micro_batches), shares)
        weights = None
        if "sum_loss_weights" in micro_batches[0]:
            weights = math.fsum(batch["sum_loss_weights"] for batch in micro_batches)
            weights = _sum_over_shares(weights, shares)
        yield OptimizerStep(micro_batches, max(1, targets), shares, weights)
        del micro_batches  # its memory is free while the next step is waited for


def _sum_over_shares(count: _Number, num_replicas: int) -> _Number:
    """Sum over the shares of the data. Ranks that compute one replica together hold the same share, which counts
    once."""
    if num_replicas == 1:
        return count
    if not dist.is_initialized():
        raise RuntimeError(
            "several ranks share an optimizer step, so they add up its target tokens, but there is no "
            "process group. Call torch.distributed.init_process_group first."
        )
    copies, rest = divmod(dist.get_world_size(), num_replicas)
    if rest or not copies:
        raise RuntimeError(
            f"{dist.get_world_size()} ranks cannot hold {num_replicas} shares of the data equally often, so the "
            "target tokens of a step cannot be added up. Build the sampler with mesh= or group= of these ranks."
        )
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.int64 if isinstance(count, int) else torch.float64
    total = torch.tensor(count, dtype=dtype, device=device)
    dist.all_reduce(total)
    return type(count)(total.item() // copies if isinstance(count, int) else total.item() / copies)
