"""The update rule and the learning rate over the run, by the names that axolotl and transformers use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from multipack.train.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """What to build once the engine has put the parameters into their final form."""

    name: str = "adamw_torch"
    """adamw_torch, adamw_torch_fused, adamw_bnb_8bit (state in 8 bits, bitsandbytes), adamw_torch_8bit,
    adamw_torch_4bit (torchao) or sgd."""
    learning_rate: float = 1e-3
    """Highest learning rate of the schedule."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors (biases, norms) have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's moments; sgd takes the first as its momentum."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""

    def rule(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and its arguments, parameters left out."""
        adamw = {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps}
        if self.name in ("adamw_torch", "adamw_torch_fused"):
            return torch.optim.AdamW, adamw | ({"fused": True} if self.name == "adamw_torch_fused" else {})
        if self.name == "adamw_bnb_8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit, adamw
        if self.name in ("adamw_torch_8bit", "adamw_torch_4bit"):
            try:
                from torchao.optim import AdamW4bit
                from torchao.optim import AdamW8bit as AdamW8bitOfTorchao
            except ImportError as error:
                raise ValueError(
                    f"optimizer {self.name} is torchao's, which is not installed: install torchao, or set "
                    "adamw_bnb_8bit."
                ) from error
            return (AdamW8bitOfTorchao if self.name.endswith("8bit") else AdamW4bit), adamw
        if self.name == "sgd":
            return torch.optim.SGD, {"lr": self.learning_rate, "momentum": self.betas[0]}
        raise ValueError(
            f"no optimizer is called {self.name!r}: take adamw_torch, adamw_torch_fused, adamw_bnb_8bit, "
            "adamw_torch_8bit, adamw_torch_4bit or sgd."
        )

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """The trainable parameters as one group with weight decay (matrices) and one without (vectors); empty
        ones left out."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        matrices = [parameter for parameter in trainable if parameter.ndim > 1]
        vectors = [parameter for parameter in trainable if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over the trainable ones of `parameters`."""
        cls, arguments = self.rule()
        return cls(self.groups(parameters), **arguments)


def optimizer_spec(config: RunConfig) -> OptimizerSpec:
    """The optimizer that a configuration asks for."""
    return OptimizerSpec(
        name=config.optimizer,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
    )


def learning_rate_schedule(
    name: str, optimizer: torch.optim.Optimizer, *, warmup_steps: int, num_steps: int
) -> LambdaLR:
    """Linear warm-up to the optimizer's rate, then `name`'s shape down to the last of `num_steps` optimizer
    steps.

    The shapes are those of transformers' `get_scheduler`, whose import would load peft and bitsandbytes (4 s)
    for a formula.
    """
    shape = _SHAPES[name]

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        return shape(min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)))

    return LambdaLR(optimizer, factor)


def go_to_step(schedule: LambdaLR, step: int) -> None:
    """Put a schedule where it is after `step` optimizer steps.

    The rates are those of this run's keys: a saved schedule would bring the old learning rate back, also
    where a run that diverged is resumed with a lower one.
    """
    rates = [rate * factor(step) for rate, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": step, "_last_lr": rates})
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Give a group of parameters a learning rate; torchao keeps it in a tensor, which must stay the same
    one."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "constant_with_warmup": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""Share of the highest rate by the share of the steps after the warm-up that is done."""
