"""The learning rate over a run is that of transformers' schedules of the same names; which parameters
decay."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from multipack.train.optim import OptimizerSpec, go_to_step, learning_rate_schedule


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


def test_a_resumed_schedule_goes_on_with_the_rates_of_its_own_run():
    # Linear over 10 steps after 2 of warm-up: 0, 1/2, 1, 7/8, 6/8, ... of the highest rate. Steps 4 and 5 of
    # a run with 0.5 ...
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = learning_rate_schedule("linear", optimizer, warmup_steps=2, num_steps=10)
    assert optimizer.param_groups[0]["lr"] == 0
    go_to_step(schedule, 4)
    rates = []
    for _ in range(2):
        assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5 * 6 / 8, 0.5 * 5 / 8])


def test_matrices_decay_and_vectors_and_frozen_ones_do_not():
    layer = torch.nn.Linear(3, 2)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    spec = OptimizerSpec(name="sgd", learning_rate=0.5, weight_decay=0.1, betas=(0.0, 0.9))
    optimizer = spec.build([*layer.parameters(), *frozen.parameters()])
    assert [(group["params"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ([layer.weight], 0.1),
        ([layer.bias], 0.0),
    ]
    before = [layer.weight.detach().clone(), layer.bias.detach().clone()]
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before[0] * (1 - 0.5 * 0.1))
    assert torch.equal(layer.bias.detach(), before[1])


def test_a_name_is_its_rule_with_the_numbers_given():
    spec = {"learning_rate": 0.5, "betas": (0.7, 0.8), "eps": 1e-4}
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    built = {
        name: OptimizerSpec(name=name, **spec).build(parameters)
        for name in ("adamw_torch", "adamw_torch_fused", "sgd")
    }
    for name, fused in (("adamw_torch", None), ("adamw_torch_fused", True)):
        assert type(built[name]) is torch.optim.AdamW
        numbers = built[name].defaults
        assert (numbers["lr"], numbers["betas"], numbers["eps"], numbers["fused"]) == (
            0.5,
            (0.7, 0.8),
            1e-4,
            fused,
        )
    assert type(built["sgd"]) is torch.optim.SGD
    assert (built["sgd"].defaults["lr"], built["sgd"].defaults["momentum"]) == (0.5, 0.7)
    with pytest.raises(ValueError, match="no optimizer is called 'adam'"):
        OptimizerSpec(name="adam").rule()
