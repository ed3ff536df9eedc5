"""What one optimizer step did, over all ranks, and how to read it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

_PEAK_TFLOPS = (  # dense bfloat16 of the vendor's data sheets; the first name found in the device's name counts
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Sums over all ranks of one optimizer step, or of several (`merge`)."""

    step: int
    """Optimizer steps done, this one included."""
    epoch: float
    """Passes over the data done, in fractions."""
    loss: float
    """Mean cross-entropy of a target token, in nats."""
    learning_rate: float
    """Of the last step."""
    grad_norm: float
    """Norm over all ranks before clipping; of several steps the largest."""
    num_sequences: int
    """Sequences trained on; repeats that fill up a tail are left out."""
    num_tokens: int
    """Their tokens."""
    num_target_tokens: int
    """Tokens with a label."""
    num_slots: int
    """Token slots that the model computed, padding included."""
    num_bin_slots: int
    """Room of the bins: capacity times bins. Without packing, `num_slots`."""
    seconds: float
    """Wall time of the step on the slowest rank."""
    wait_seconds: float
    """Of it, time spent waiting for a batch, mean over ranks."""

    @property
    def samples_per_s(self) -> float:
        """Sequences a second over all ranks."""
        return _ratio(self.num_sequences, self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second over all ranks; padding is not counted."""
        return _ratio(self.num_tokens, self.seconds)

    @property
    def padding_share(self) -> float:
        """Share of computed slots that held padding, 0..1. Above 0.02: pack, or set pad_to_sequence_len to
        false."""
        return 1.0 - _ratio(self.num_tokens, self.num_slots)

    @property
    def bin_fill(self) -> float:
        """Tokens over the room of their bins, 0..1. Below 0.95: rows are long for the capacity; raise
        sequence_len."""
        return _ratio(self.num_tokens, self.num_bin_slots)

    @property
    def wait_share(self) -> float:
        """Share of wall time spent waiting for data, 0..1. Above 0.01 the loader is the bottleneck: raise
        num_workers."""
        return _ratio(self.wait_seconds, self.seconds)


def merge(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Join consecutive steps: counts and seconds add up, the loss is weighted by target tokens.

    Raises:
        ValueError: no steps.
    """
    if not steps:
        raise ValueError("0 steps cannot be joined: nothing was trained.")
    targets = sum(step.num_target_tokens for step in steps)
    return StepMetrics(
        step=steps[-1].step,
        epoch=steps[-1].epoch,
        loss=_ratio(math.fsum(s.loss * s.num_target_tokens for s in steps if s.num_target_tokens), targets),
        learning_rate=steps[-1].learning_rate,
        grad_norm=max(step.grad_norm for step in steps),
        num_sequences=sum(step.num_sequences for step in steps),
        num_tokens=sum(step.num_tokens for step in steps),
        num_target_tokens=targets,
        num_slots=sum(step.num_slots for step in steps),
        num_bin_slots=sum(step.num_bin_slots for step in steps),
        seconds=math.fsum(step.seconds for step in steps),
        wait_seconds=math.fsum(step.wait_seconds for step in steps),
    )


class Operations(NamedTuple):
    """Floating-point operations of forward and backward, attention's products left out."""

    per_token: float
    """Of the layers between embedding and output, for each token."""
    per_target: float
    """Of the output layer, which runs only where a target is predicted."""

    def of(self, metrics: StepMetrics) -> float:
        """Of the steps that `metrics` count; padding is not counted."""
        return self.per_token * metrics.num_tokens + self.per_target * metrics.num_target_tokens


def model_operations(model: nn.Module) -> Operations:
    """What a token costs in a transformers causal language model.

    The input embedding is a look-up and costs nothing; where its matrix is also the output layer, it counts
    as that.
    """
    module: Any = model
    head = {id(parameter) for parameter in module.get_output_embeddings().parameters()}
    look_up = {id(parameter) for parameter in module.get_input_embeddings().parameters()} - head

    def cost(parameters: list[nn.Parameter]) -> float:
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return flops_per_token(sum(parameter.numel() for parameter in parameters), trained)

    every = list(model.parameters())
    return Operations(
        per_token=cost([p for p in every if id(p) not in head | look_up]),
        per_target=cost([p for p in every if id(p) in head]),
    )


def flops_per_token(num_parameters: int, num_trainable: int) -> float:
    """Floating-point operations that a token costs in forward and backward, attention's products left out.

    Two for each parameter forward, two for the gradient of its input, two for its own gradient where it is
    trained.
    """
    return 4.0 * num_parameters + 2.0 * num_trainable


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU by its name; None where it is not known."""
    for name, tflops in _PEAK_TFLOPS:
        if re.search(rf"\b{name}\b", device_name):
            return tflops * 1e12
    return None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
