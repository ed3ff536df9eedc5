"""Find ranks that hold parts of one model and so must get the same batches, from what torch and frameworks
have set up.

Tensor-, context-, sequence- and pipeline-parallel ranks compute one replica together. If each of them took a
share of the data of its own, every layer would mix activations of different batches, and nothing would fail.
No framework is imported here: what is not in `sys.modules` was not set up. One rule: this only finds and
says; which share a rank takes, the user says.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_DIMENSIONS = frozenset(
    {
        *("tp", "cp", "sp", "pp", "mp"),
        *("tensor", "context", "sequence", "pipeline", "pipe", "model", "tensor_model", "pipeline_model"),
    }
)
"""Names of mesh dimensions and process groups whose ranks share a model replica, without `mesh_`, `_parallel`
and `_group`."""


@dataclass(frozen=True)
class SharedReplica:
    """Several ranks that compute one model replica together."""

    found_in: str
    """Where that is written, such as "accelerate's parallelism_config"."""
    dimension: str
    """The name it has there, such as "tp"."""
    size: int
    """Ranks of it, above 1."""
    remedy: str
    """Arguments that say which ranks take shares of the data."""

    def __str__(self) -> str:
        return (
            f"{self.found_in} has {self.dimension} = {self.size}: {self.size} ranks compute each model "
            f"replica and must get the same batches, but every rank would get its own. Pass {self.remedy}."
        )


def shares_replica(name: str) -> bool:
    """Whether the ranks of a mesh dimension or process group of this name share a model replica."""
    short = name.lower().removeprefix("mesh_").removesuffix("_group").removesuffix("_parallel")
    return short in _DIMENSIONS


def find_shared_replica() -> SharedReplica | None:
    """The first sign of ranks that share a replica; None where all ranks are data-parallel, as far as can be
    known.

    Reads accelerate's state, Megatron's and DeepSpeed's, all named meshes, and the descriptions of process
    groups. A mesh without names says nothing.
    """
    for look in (_in_accelerate, _in_megatron, _in_deepspeed, _in_meshes, _in_groups):
        found = next(look(), None)
        if found is not None:
            return found
    return None


_ONE_REPLICA = "rank=0, num_replicas=1, since all ranks compute one replica"


def _in_accelerate() -> Iterator[SharedReplica]:
    module = sys.modules.get("accelerate.state")
    config = module.AcceleratorState._shared_state.get("parallelism_config") if module else None
    for name in ("tp", "cp", "sp"):
        size = getattr(config, f"{name}_size", 1)
        if size > 1:
            yield SharedReplica("accelerate's parallelism_config", name, size, _accelerate_remedy(config))


def _accelerate_remedy(config: Any) -> str:
    if not config.dp_dim_names:
        return _ONE_REPLICA
    if (
        getattr(config, "sp_size", 1) > 1 and getattr(config, "sp_backend", "") == "deepspeed"
    ):  # it makes no mesh
        return f"rank=accelerator.process_index // {config.sp_size}, num_replicas=accelerator.num_processes // {config.sp_size}"
    return f"mesh=accelerator.torch_device_mesh[{tuple(config.dp_dim_names)}]"


_MEGATRON = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.mpu")
_SIZES = (
    "get_tensor_model_parallel_world_size",
    "get_model_parallel_world_size",
    "get_context_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
)


def _in_megatron() -> Iterator[SharedReplica]:
    for name in _MEGATRON:
        state = sys.modules.get(name)
        if state is not None and state.model_parallel_is_initialized():
            yield from _sizes_of(state, name, f"group={name}.get_data_parallel_group()")


def _in_deepspeed() -> Iterator[SharedReplica]:
    sequence = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    group = getattr(sequence, "_SEQUENCE_PARALLEL_GROUP", None)
    if group is not None and dist.get_world_size(group) > 1:
        size = dist.get_world_size(group)
        remedy = (
            f"rank=dist.get_rank() // {size}, num_replicas=dist.get_world_size() // {size}, since its "
            "sequence-parallel ranks are neighbours"
        )
        yield SharedReplica("DeepSpeed's sequence parallelism", "sequence_parallel_size", size, remedy)
    mpu = getattr(sys.modules.get("deepspeed.utils.groups"), "mpu", None)
    if mpu is not None:
        yield from _sizes_of(mpu, "DeepSpeed's mpu", "group=mpu.get_data_parallel_group()")


def _sizes_of(state: Any, where: str, remedy: str) -> Iterator[SharedReplica]:
    for name in _SIZES:
        size = getattr(state, name, None)
        if size is not None and (found := size()) > 1:
            dimension = name.removeprefix("get_").removesuffix("_world_size")
            yield SharedReplica(where, dimension, found, remedy)


def _in_meshes() -> Iterator[SharedReplica]:
    """Named dimensions of all meshes of this process. torch keeps no list of them, so they are asked of the
    garbage collector."""
    from torch.distributed.device_mesh import DeviceMesh

    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            yield from in_mesh(mesh)


def in_mesh(mesh: Any) -> Iterator[SharedReplica]:
    """Named dimensions of one mesh whose ranks share a replica, with a remedy in terms of its other
    dimensions."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    others = [name for name, size in sizes.items() if size > 1 and not shares_replica(name)]
    remedy = f"mesh=mesh[{', '.join(map(repr, others))}]" if others else _ONE_REPLICA
    for name, size in sizes.items():
        if shares_replica(name) and size > 1:
            yield SharedReplica(f"the device mesh {dict(sizes)}", name, size, remedy)


def _in_groups() -> Iterator[SharedReplica]:
    world = getattr(dist.distributed_c10d, "_world", None)
    for group, members in list(getattr(world, "pg_group_ranks", {}).items()):
        description = getattr(group, "group_desc", "")
        if shares_replica(description) and len(members) > 1 and dist.get_rank() in members:
            yield SharedReplica(
                "a process group", description, len(members), "the data-parallel group by group=, or mesh="
            )
