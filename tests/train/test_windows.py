"""Optimizer steps of an epoch: windows of micro-batches, the last one included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.train import loop
from multipack.train.config import TrainConfig
from multipack.train.metrics import StepMetrics
from multipack.train.stop import StopOnSigterm
from multipack.train.windows import epoch_steps, steps_left, windows


def training(num_batches: int, accumulate: int, num_epochs: int = 1) -> tuple[DataLoader[Any], TrainConfig]:
    """A loader of so many batches of two tokens each."""
    dataset = TokenDataset((np.ones(2 * num_batches, np.int32), np.arange(0, 2 * num_batches + 1, 2)))
    sampler = DistributedBatchSampler(MultipackBatchSampler(dataset.lengths, 2), num_replicas=1, rank=0)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator())
    return loader, TrainConfig(gradient_accumulation_steps=accumulate, num_epochs=num_epochs)


def steps_of(loader: DataLoader[Any], config: TrainConfig) -> int:
    """Optimizer steps that the schedule is made for."""
    sampler: Any = loader.batch_sampler
    return steps_left(sampler, epoch_steps(sampler, config), config)


class Divisors:
    """An engine that notes what each micro-step is divided by."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.steps: list[list[float]] = [[]]

    def micro_step(self, loss_sum: Any, *, divisor: float, last: bool) -> torch.Tensor:
        self.steps[-1].append(divisor)
        return torch.zeros(())

    def step(self) -> torch.Tensor:
        self.steps.append([])
        return torch.zeros(())


@pytest.mark.parametrize(("num_batches", "accumulate", "expected"), [(7, 4, [4, 3]), (260, 256, [256, 4])])
@pytest.mark.report("NVIDIA-NeMo/Automodel#2257")
def test_the_last_window_of_an_epoch_is_stepped(
    num_batches: int, accumulate: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step is divided by its own target tokens, one a batch here."""
    loader, config = training(num_batches, accumulate)
    assert steps_of(loader, config) == 2
    engine: Any = Divisors()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    monkeypatch.setattr(loop, "sum_over_ranks", lambda *counts: list(counts))
    monkeypatch.setattr(loop.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 1)
    reported: list[StepMetrics] = []
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    stepper = loop.Stepper(engine, schedule, first_step=0, report=reported.append, stop=StopOnSigterm())
    optimizer.step()  # so that the schedule has something to follow
    for window in windows(loader, config):
        stepper.take(window)
    stepper.flush()
    assert engine.steps[:-1] == [[expected[0]] * expected[0], [expected[1]] * expected[1]]
    assert [line.num_target_tokens for line in reported] == expected
    assert schedule.last_epoch == 2


@pytest.mark.report("huggingface/transformers#22082")
def test_windows_end_with_the_epoch() -> None:
    loader, config = training(10, accumulate=4, num_epochs=2)
    assert steps_of(loader, config) == 6
    found = list(windows(loader, config))
    assert [len(window.batches) for window in found] == [4, 4, 2, 4, 4, 2]
    assert [window.ends_epoch for window in found] == [False, False, True] * 2
    assert [window.epoch for window in found] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])
