"""The engine that trains with DeepSpeed (extra `deepspeed`), from a DeepSpeed JSON file.

DeepSpeed keeps three habits that change a run in silence; this file takes each away. It clips at 1.0 unless
told otherwise, so clipping is always written. It divides by a fixed number of micro-steps, so it is told 1
and the divisor stays ours. It thinks that every backward ends a step unless told otherwise, so the boundary
is always set.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from multipack.train.engine import Engine, EngineOptions
from multipack.train.optim import OptimizerSpec

T = TypeVar("T")


def read_deepspeed_file(
    path: str, *, micro_batch_size: int, gradient_accumulation_steps: int, max_grad_norm: float, bf16: bool
) -> dict[str, Any]:
    """The configuration in a DeepSpeed JSON file, checked against the run's; cheap, so that it can come
    before the model.

    "auto" takes the run's value, or inside `zero_optimization` DeepSpeed's own default.

    Raises:
        ValueError: DeepSpeed is not installed, or the file is missing, no JSON, or says something else than
            the run.
    """
    if find_spec("deepspeed") is None:
        raise ValueError(
            f"deepspeed: {path} needs DeepSpeed, which is not installed. Install multipack[train,deepspeed], "
            "or set zero_stage."
        )
    try:
        file = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"deepspeed: {path} cannot be read ({error.strerror}). Give the path of a DeepSpeed JSON file."
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"deepspeed: {path} is no JSON, line {error.lineno}: {error.msg}.") from error
    run = {
        ("train_micro_batch_size_per_gpu",): micro_batch_size,
        ("gradient_accumulation_steps",): gradient_accumulation_steps,
        ("gradient_clipping",): max_grad_norm,
        ("bf16", "enabled"): bf16,
        ("fp16", "enabled"): False,
    }
    for keys, value in run.items():
        written: Any = file
        for key in keys:
            written = written.get(key, "auto")
            if written == "auto":
                break
        if written != "auto" and written != value:
            raise ValueError(
                f"{path} says {'.'.join(keys)}: {written}, the run says {value}. Write auto into the file, "
                "or the same value in both."
            )
    for section in ("optimizer", "scheduler", "train_batch_size"):
        if file.get(section, "auto") != "auto":
            raise ValueError(f"{path} sets {section}, which the run sets itself: remove it from the file.")
    zero = {key: value for key, value in file.get("zero_optimization", {}).items() if value != "auto"}
    if zero.get("stage", 0) not in (1, 2, 3):
        raise ValueError(
            f"{path} sets zero_optimization.stage {zero.get('stage', 0)}; it is 1, 2 or 3. Stage 0 is "
            "zero_stage: 0."
        )
    ours = {"optimizer", "scheduler", "train_batch_size", "bf16", "fp16"} | {keys[0] for keys in run}
    return {key: value for key, value in file.items() if key not in ours and value != "auto"} | {
        "zero_optimization": zero
    }


class DeepSpeedEngine(Engine):
    """ZeRO 1, 2 or 3 by DeepSpeed, the optimizer's state in host memory if the file says so."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSpec, options: EngineOptions, device: torch.device
    ) -> None:
        import deepspeed

        assert options.deepspeed is not None
        self.module = model.to(device)
        self.device = device
        self.optimizer = optimizer.build(model.parameters())
        self._eight_bit = optimizer.name == "adamw_bnb_8bit"
        self._stage: int = options.deepspeed["zero_optimization"]["stage"]
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it even where no launcher started ranks
        self._engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=self.optimizer,
            dist_init_required=False,
            config=options.deepspeed
            | {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": options.max_grad_norm,
                "bf16": {"enabled": options.bf16},
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        self.model = self._engine
        self._world_size = dist.get_world_size()

    def micro_step(self, loss_sum: Callable[[Any], Tensor], *, divisor: float, last: bool) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        loss = loss_sum(self.model)
        self._engine.backward(loss * (self._world_size / divisor))
        if not last:
            self._engine.step()  # counts the micro-step, updates nothing
        return loss.detach()

    def step(self) -> Tensor:
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm(), device=self.device)

    def infer(self, compute: Callable[[Any], T]) -> T:
        with torch.no_grad():
            return compute(self.model)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        if self._stage < 3:
            yield
            return
        import deepspeed

        # The hooks around each layer gather and free its parameters; without them the gathered ones simply
        # stay.
        offload = self._engine.optimizer.parameter_offload
        parameters = list(self.module.parameters())
        for parameter in parameters:
            parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]
        offload._remove_module_hooks()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            with deepspeed.zero.GatheredParameters(parameters):
                yield
        finally:
            offload._register_deepspeed_module(self.module)

    def state_tensors(self) -> dict[str, Tensor]:
        """Whole copies in host memory: DeepSpeed's own shards fit no other number of ranks.

        But adamw_bnb_8bit quantises blocks of a flat shard, which cannot be cut again: its state is saved
        under the rank's name, and loads on as many ranks.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._make_state()
        self._copies: dict[str, Tensor] = {}
        for name, parameter in self._trained():
            self._copies[f"model.{name}"] = safe_get_full_fp32_param(parameter).cpu()
            if self._eight_bit:
                continue
            for key in self._moments():
                self._copies[f"optimizer.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).cpu()
            self._copies[f"optimizer.{name}.step"] = self._steps()
        if self._eight_bit:
            self._copies |= self._rank_state()
        return self._copies

    def _rank_state(self) -> dict[str, Tensor]:
        rank = f"rank{dist.get_rank()}of{self._world_size}"
        return {
            f"optimizer.shard{i}.{key}.{rank}": torch.as_tensor(value)
            for i, (shard, _) in enumerate(self._shards())
            for key, value in self.optimizer.state[shard].items()
        }

    def loaded(self) -> None:
        for name, parameter in self._trained():
            self._write(parameter, None, self._copies[f"model.{name}"].to(self.device))
            if self._eight_bit:
                continue
            for key in self._moments():
                self._write(parameter, key, self._copies[f"optimizer.{name}.{key}"].to(self.device))
            for state in self.optimizer.state.values():
                state["step"] = self._copies[f"optimizer.{name}.step"].clone()
        if self._eight_bit:  # its tensors were filled in place; its count is a Python int
            step = next(value for name, value in self._copies.items() if ".step." in name)
            for state in self.optimizer.state.values():
                state["step"] = int(step)
        del self._copies

    def _write(self, parameter: nn.Parameter, key: str | None, value: Tensor) -> None:
        """Put a whole float32 parameter, or its moment `key`, into this rank's shard of it, and the parameter
        into the model."""
        import deepspeed
        from deepspeed import utils

        if self._stage < 3:
            if key is not None:
                utils.safe_set_full_optimizer_state(parameter, value, key)
                return
            utils.safe_set_full_fp32_param(parameter, value)
            with torch.no_grad():
                parameter.copy_(value)
            return
        # DeepSpeed's own setters for stage 3 fail where the ranks do not divide the parameter; the shards are
        # padded then.
        shard = utils.safe_get_local_fp32_param(parameter)
        padded = F.pad(value.flatten(), (0, shard.numel() * self._world_size - value.numel()))
        mine = padded[shard.numel() * dist.get_rank() :][: shard.numel()]
        if key is not None:
            utils.safe_set_local_optimizer_state(parameter, mine, key)
            return
        utils.safe_set_local_fp32_param(parameter, mine)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)

    def _make_state(self) -> None:
        """Let the optimizer allocate its state for every flat shard, by one step of rate 0 along a zero
        gradient."""
        groups = self.optimizer.param_groups
        for shard, group in self._shards():
            if shard not in self.optimizer.state:
                gradient, shard.grad = shard.grad, torch.zeros_like(shard)
                self.optimizer.param_groups = [groups[group] | {"params": [shard], "lr": 0.0}]
                self.optimizer.step()
                shard.grad = gradient
        self.optimizer.param_groups = groups
        if self._stage < 3:  # DeepSpeed links parameters to state once, when only the first group has any
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _shards(self) -> list[tuple[Tensor, int]]:
        """The flat float32 shards of this rank that the optimizer updates, each with the number of its
        parameter group."""
        zero = self._engine.optimizer
        if self._stage == 3:
            return list(
                zip(zero.fp32_partitioned_groups_flat, zero.sub_group_to_group_id.values(), strict=True)
            )
        return list(
            zip(zero.single_partition_of_fp32_groups, range(len(self.optimizer.param_groups)), strict=True)
        )

    def full_parameters(self) -> dict[str, Tensor]:
        import deepspeed

        parameters = list(self.module.parameters()) if self._stage == 3 else []
        with deepspeed.zero.GatheredParameters(parameters):
            if dist.get_rank() > 0:
                return {}
            return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad
        ]

    def _moments(self) -> list[str]:
        state: dict[str, Tensor] = next(iter(self.optimizer.state.values()))
        return [key for key in state if key != "step"]

    def _steps(self) -> Tensor:
        state: dict[str, Tensor] = next(iter(self.optimizer.state.values()))
        return state.get("step", torch.tensor(0.0)).cpu().clone()
