"""What SFT and PPO share: a model spread over ranks, its gradients and its optimizer.

    engine = build_engine(model, OptimizerSpec(...), EngineOptions(zero_stage=2))
    for i, batch in enumerate(micro_batches):                # as many on every rank
        loss_sum = engine.micro_step(lambda model: causal_lm_loss_sum(model, batch), divisor=tokens, last=i ==
        len(micro_batches) - 1)
    gradient_norm = engine.step()

The one rule: a loss is a sum on its rank, `divisor` counts the same things over all ranks and all micro-steps
of the optimizer step, and so the gradient is that of one mean over them, however they were cut into ranks and
micro-steps.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from multipack.train.optim import OptimizerSpec, set_rate

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the model is spread over the ranks."""

    zero_stage: int = 0
    """What ranks share out: 0 nothing (DDP), 1 optimizer state, 2 also gradients, 3 also parameters (FSDP2
    for 2 and 3)."""
    offload: bool = False
    """Keep the shards in host memory between uses; stages 2 and 3."""
    bf16: bool = False
    """Compute in bfloat16; parameters, gradients' sums over ranks and optimizer state stay float32."""
    max_grad_norm: float = 0.0
    """The gradient of a step is scaled down to this norm over all ranks. 0: measured only."""
    deepspeed: dict[str, Any] | None = None
    """A DeepSpeed configuration: DeepSpeed takes the place of torch's own, with the stage written there."""


class Engine(ABC):
    """One model with its optimizer on this rank; `build_engine` makes the right kind."""

    model: Callable[..., Any]
    """What a loss calls: the wrapped model."""
    module: nn.Module
    """The model itself, unwrapped; its parameters are what the optimizer updates (shards with stages 2 and
    3)."""
    optimizer: torch.optim.Optimizer
    """Its `param_groups` carry the learning rate."""
    device: torch.device

    @abstractmethod
    def micro_step(self, loss_sum: Callable[[Any], Tensor], *, divisor: float, last: bool) -> Tensor:
        """Add the gradient of one micro-batch.

        Args:
            loss_sum: gets the wrapped model, returns this rank's summed loss, a scalar.
            divisor: what the sums of all ranks and micro-steps of this optimizer step are divided by, the
                same on all.
            last: whether `step` comes next. Every rank takes equally many micro-steps before it.

        Returns:
            The summed loss, detached, on the device.
        """

    @abstractmethod
    def step(self) -> Tensor:
        """Clip, update, and clear the gradients; the gradient's norm over all ranks before clipping, a scalar
        tensor."""

    @abstractmethod
    def infer(self, compute: Callable[[Any], T]) -> T:
        """`compute(model)` without gradients, in the precision of training. Stage 3 needs it on all ranks
        alike."""

    @abstractmethod
    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """While open every rank holds all parameters, and forwards talk to no other rank: for generation of
        any length."""

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """Trained parameters, buffers and optimizer state by name, as this rank holds them: loading writes
        into these tensors."""

    @abstractmethod
    def loaded(self) -> None:
        """Take over what was written into `state_tensors()`."""

    @abstractmethod
    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole, on the CPU of rank 0; empty elsewhere. A collective call."""


def build_engine(
    model: nn.Module, optimizer: OptimizerSpec, options: EngineOptions, device: torch.device
) -> Engine:
    """Spread `model` over the ranks of the process group; every rank passes the same weights.

    Raises:
        ValueError: parts of the options that contradict each other or the model.
    """
    if options.deepspeed is not None:
        from multipack.train.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, optimizer, options, device)
    if options.zero_stage in (0, 1):
        return ReplicatedEngine(model, optimizer, options, device)
    if options.zero_stage in (2, 3):
        return ShardedEngine(model, optimizer, options, device)
    raise ValueError(f"zero_stage is 0, 1, 2 or 3, got {options.zero_stage}.")


class _TorchEngine(Engine):
    """The part in which DDP and FSDP2 agree: both average gradients over ranks, hence the factor of the world
    size."""

    _local_optimizer: torch.optim.Optimizer
    """The one whose state lies on this rank: `optimizer` itself, or this rank's part of it."""

    def __init__(self, module: nn.Module, options: EngineOptions, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._max_grad_norm = options.max_grad_norm or math.inf
        self._world_size = dist.get_world_size()

    def _backward(self, loss_sum: Tensor, divisor: float) -> Tensor:
        torch.autograd.backward(loss_sum * (self._world_size / divisor))
        return loss_sum.detach()

    def step(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        optimizer = self._local_optimizer
        _make_state(optimizer)
        tensors = trained_tensors(self.module)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if key.startswith("qmap"):
                    continue  # bitsandbytes' table of 8-bit codes: a constant, one memory for all parameters
                state[key] = value if isinstance(value, Tensor) else torch.tensor(value)
                tensors |= _plain_tensors(f"optimizer.{names[parameter]}.{key}", state[key])
        return tensors

    def loaded(self) -> None:
        for state in self._local_optimizer.state.values():
            if isinstance(state.get("step"), Tensor) and state["step"].dtype == torch.int64:
                state["step"] = int(state["step"])  # bitsandbytes counts in a Python int


def _plain_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """A tensor by its name; one that only wraps others, such as torchao's rounded state, as those."""
    if isinstance(value, DTensor) or not is_traceable_wrapper_subclass(
        value
    ):  # a shard is saved as what it is part of
        return {name: value}
    parts, _ = value.__tensor_flatten__()
    return {f"{name}.{part}": getattr(value, part) for part in parts if part != "qmap"}


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors training changes: parameters with a gradient, and buffers that belong to the model's
    state."""
    trained = {f"model.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}
    kept = module.state_dict().keys()
    return trained | {f"model.{name}": buffer for name, buffer in module.named_buffers() if name in kept}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state by one step of rate 0 along a zero gradient, unless it has done
    real ones."""
    if optimizer.state:
        return
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)


# Buffers are the same everywhere and stay so; torch 2.13 gave the switch another name.
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class ReplicatedEngine(_TorchEngine):
    """Stages 0 and 1: every rank holds the model; DDP sums gradients once a step; stage 1 shares out the
    optimizer state."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSpec, options: EngineOptions, device: torch.device
    ) -> None:
        if options.offload:
            raise ValueError(
                f"offload needs zero_stage 2 or 3, got {options.zero_stage}: replicated weights stay on the "
                "device."
            )
        super().__init__(model.to(device), options, device)
        self._bf16 = options.bf16
        self._ddp = None
        if self._world_size > 1:
            self._ddp = DistributedDataParallel(self.module, gradient_as_bucket_view=True, **_NO_BUFFER_SYNC)
        self.model = self._ddp or self.module
        if options.zero_stage == 1:
            self.optimizer, self._local_optimizer = _shared_out(optimizer, self.module)
        else:
            self.optimizer = self._local_optimizer = optimizer.build(self.module.parameters())

    def micro_step(self, loss_sum: Callable[[Any], Tensor], *, divisor: float, last: bool) -> Tensor:
        with contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            with self._precision():
                loss = loss_sum(self.model)
            return self._backward(loss, divisor)

    def infer(self, compute: Callable[[Any], T]) -> T:
        with torch.no_grad(), self._precision():
            return compute(self.module)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16)

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def full_parameters(self) -> dict[str, Tensor]:
        if dist.get_rank() > 0:
            return {}
        return {name: tensor.cpu() for name, tensor in self.module.state_dict().items()}


def _shared_out(
    spec: OptimizerSpec, module: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Stage 1: the optimizer of all parameters, and the one inside it that updates this rank's."""
    with (
        warnings.catch_warnings()
    ):  # torch compiles unused optimizers with a deprecated tool when this is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    cls, arguments = spec.rule()
    optimizer = ZeroRedundancyOptimizer(spec.groups(module.parameters()), cls, **arguments)
    return optimizer, optimizer.optim


class ShardedEngine(_TorchEngine):
    """Stages 2 and 3: FSDP2. Stage 2 gathers parameters and sums gradients once an optimizer step, stage 3
    once a micro-step."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSpec, options: EngineOptions, device: torch.device
    ) -> None:
        if optimizer.name == "adamw_bnb_8bit":
            raise ValueError(
                f"adamw_bnb_8bit cannot update the sharded parameters of zero_stage {options.zero_stage}: "
                "take adamw_torch, zero_stage 0 or 1, or a DeepSpeed configuration."
            )
        if whole := [name for name, p in model.named_parameters() if not p.is_floating_point()]:
            raise ValueError(
                f"zero_stage {options.zero_stage} cannot shard quantised weights ({len(whole)}, the first is "
                f"{whole[0]}): take zero_stage 0 or 1, which share out what a QLoRA run trains."
            )
        self._each_micro_step = options.zero_stage == 3
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.offload else OffloadPolicy()
        for block in [*_blocks(model), model]:
            fully_shard(
                block,
                mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
                reshard_after_forward=self._each_micro_step,
                mp_policy=precision if options.bf16 else MixedPrecisionPolicy(),
                offload_policy=offload,
            )
        super().__init__(model, options, device)
        assert isinstance(model, FSDPModule)
        self._fsdp = model
        self._gathered = False
        self.model = model
        self.optimizer = self._local_optimizer = optimizer.build(model.parameters())

    def micro_step(self, loss_sum: Callable[[Any], Tensor], *, divisor: float, last: bool) -> Tensor:
        now = last or self._each_micro_step
        self._fsdp.set_requires_gradient_sync(now)
        self._fsdp.set_reshard_after_backward(now)
        return self._backward(loss_sum(self.model), divisor)

    def infer(self, compute: Callable[[Any], T]) -> T:
        with torch.no_grad():
            result = compute(self.model)
        if not self._gathered:
            self._reshard()  # stage 2 would leave whole parameters behind, where the optimizer's shards belong
        return result

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        self._fsdp.set_reshard_after_forward(False)
        for shard in self._shards():
            shard.unshard()
        self._gathered = True
        try:
            yield
        finally:
            self._gathered = False
            self._reshard()
            self._fsdp.set_reshard_after_forward(self._each_micro_step)

    def _reshard(self) -> None:
        for shard in self._shards():
            shard.reshard()

    def _shards(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def full_parameters(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if dist.get_rank() == 0:
                full[name] = whole.cpu()
        return full


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers transformers says must not be split: each is gathered and freed as one."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]
