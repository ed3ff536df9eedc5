"""Supervised rows mixed into the updates, so that the policy does not forget how to write (PPO-ptx, Ouyang et
al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.train.engine import Engine
from multipack.train.ppo.buffer import actions_of
from multipack.train.process import sum_over_ranks


class PtxMix:
    """An endless stream of packed supervised micro-batches.

    Args:
        dataset: rows with labels, each at most `capacity` tokens.
        capacity: token slots of a bin.
        bins_per_step: bins of an optimizer step, over all ranks; a multiple of the ranks.
        coef: weight of the mean loss of a target token.
        seed: of the order of rows.
        num_workers: background threads.
        device: where batches go.

    Raises:
        ValueError: the bins cannot be dealt to the ranks evenly.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        capacity: int,
        bins_per_step: int,
        coef: float,
        seed: int,
        num_workers: int,
        device: torch.device,
    ) -> None:
        num_replicas = dist.get_world_size()
        if bins_per_step % num_replicas:
            raise ValueError(
                f"ptx_bins_per_step is {bins_per_step} over {num_replicas} ranks: all ranks need the same "
                f"number. Use {-(-bins_per_step // num_replicas) * num_replicas}."
            )
        self._coef = coef
        self._micro_steps = bins_per_step // num_replicas
        in_order = MultipackBatchSampler(dataset.lengths, capacity, seed=seed)
        self._loader: DataLoader[dict[str, Any]] = DataLoader(
            dataset,
            batch_sampler=DistributedBatchSampler(in_order, accumulate=self._micro_steps),
            collate_fn=PackedCollator(),
            num_workers=num_workers,
            device=device,
        )
        self._batches = self._endless()

    def add_gradient(self, engine: Engine) -> Tensor:
        """Add the gradient of one optimizer step's supervised rows; this rank's part of the mean loss,
        unweighted.

        Comes before the micro-steps of PPO, so that the last micro-step of the optimizer step uses all
        networks.
        """
        batches = [next(self._batches) for _ in range(self._micro_steps)]
        (num_targets,) = sum_over_ranks(sum(batch["num_target_tokens"] for batch in batches))
        divisor = max(1, num_targets)
        total = torch.zeros((), device=engine.device)
        for batch in batches:
            total += engine.micro_step(_cross_entropy(batch), divisor=divisor / self._coef, last=False)
        return total / divisor

    def state_dict(self) -> dict[str, Any]:
        """Position in the supervised rows."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, also of another number of ranks."""
        self._loader.load_state_dict(state)
        self._batches = self._endless()

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._loader


def _cross_entropy(batch: dict[str, Any]) -> Any:
    def loss_sum(model: Any) -> Tensor:
        loss: Tensor = -model(*actions_of(batch), temperature=1.0).logprobs.sum()
        return loss

    return loss_sum
