"""The learning rate over a run is that of transformers' schedules of the same names."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from multipack.train.optim import learning_rate_schedule


@pytest.mark.parametrize(
    ("name", "warmup_steps", "num_steps"),
    [
        ("constant", 0, 7),
        *(
            (name, warmup, steps)
            for name in ("cosine", "linear", "constant_with_warmup")
            for warmup, steps in ((0, 7), (3, 20), (5, 5))
        ),
    ],
)
def test_schedules_are_those_of_transformers(name, warmup_steps, num_steps):
    rates = []
    for build in (
        lambda optimizer: learning_rate_schedule(
            name, optimizer, warmup_steps=warmup_steps, num_steps=num_steps
        ),
        lambda optimizer: get_scheduler(
            name,
            optimizer,
            num_warmup_steps=None if name == "constant" else warmup_steps,
            num_training_steps=num_steps,
        ),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        schedule = build(optimizer)
        rates.append([])
        for _ in range(num_steps):
            rates[-1].append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
    assert rates[0] == pytest.approx(rates[1])
