"""Which share of the data this process takes, and whether the ranks agree.

Rank and number of shares come from arguments (numbers, a mesh or a group), else from the process group, else
from the environment of torchrun, else they are 0 and 1. They never come from a device index, and ranks that
hold parts of one model must be declared: they need one share together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from multipack.arguments import whole_number
from multipack.model_parallel import find_shared_replica, in_mesh


@dataclass(frozen=True)
class DataRanks:
    """This process's share of the data, and who takes the others."""

    rank: int
    """Number of the share, 0..num_replicas - 1. Ranks of one model replica have the same."""
    num_replicas: int
    """Number of shares."""
    members: tuple[int, ...] | None = None
    """Global ranks that take one share each, in their order, this process among them; None: unknown, or
    all."""
    discovered: bool = False
    """Taken from the process group or the environment, so that a later group may say something else."""

    def check_unchanged(self) -> None:
        """Refuse to go on when what was discovered holds no longer.

        Raises:
            ValueError: a process group was made since and says something else, or ranks now share a model
                replica.
        """
        if self.discovered:
            check_rank_unchanged(self.rank, self.num_replicas)
            _refuse_shared_replicas(self.num_replicas)


def data_ranks(
    rank: int | None = None,
    num_replicas: int | None = None,
    *,
    mesh: Any = None,
    group: dist.ProcessGroup | None = None,
) -> DataRanks:
    """The share of the data that this process takes.

    Args:
        rank, num_replicas: its number and the number of shares; None to discover them.
        mesh: the data-parallel dimension of a DeviceMesh, such as mesh["dp"], or several, such as
            mesh["dp_replicate", "dp_shard"], which are flattened in row-major order.
        group: the data-parallel process group.

    Raises:
        TypeError: a number is no whole number, or `mesh` no DeviceMesh.
        ValueError: the rank is outside 0..num_replicas-1, two of the ways are mixed, this process is not in
            the mesh or group, the mesh has a dimension whose ranks share a model replica, or nothing was
            passed and ranks share one.
    """
    given = [name for name, value in (("mesh", mesh), ("group", group)) if value is not None]
    if given and (len(given) > 1 or rank is not None or num_replicas is not None):
        numbers = [
            name for name, value in (("rank", rank), ("num_replicas", num_replicas)) if value is not None
        ]
        raise ValueError(
            f"{' and '.join(given + numbers)} are given, which could contradict each other: pass mesh=, or "
            "group=, or rank= and num_replicas=."
        )
    if mesh is not None:
        return _among(_members_of_mesh(mesh), "mesh")
    if group is not None:
        return _among(tuple(dist.get_process_group_ranks(group)), "group")
    discovered = rank is None or num_replicas is None
    found = DataRanks(*rank_and_world_size(rank, num_replicas), discovered=discovered)
    if discovered:
        _refuse_shared_replicas(found.num_replicas)
    return found


def _members_of_mesh(mesh: Any) -> tuple[int, ...]:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}, not a DeviceMesh: pass mesh['dp'] of one.")
    shared = next(in_mesh(mesh), None)
    if shared is not None:
        raise ValueError(str(shared))
    return tuple(mesh.mesh.flatten().tolist())


def _among(members: tuple[int, ...], what: str) -> DataRanks:
    own = dist.get_rank()
    if own not in members:
        raise ValueError(
            f"rank {own} is not in the {what} of ranks {list(members)[:8]}, so it has no share of the data: "
            f"pass the {what} that this process belongs to."
        )
    return DataRanks(members.index(own), len(members), members)


def _refuse_shared_replicas(num_replicas: int) -> None:
    if num_replicas > 1 and dist.is_available() and dist.is_initialized():
        shared = find_shared_replica()
        if shared is not None:
            raise ValueError(str(shared))


def rank_and_world_size(rank: int | None = None, num_replicas: int | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks.

    Args:
        rank: rank in 0..num_replicas-1; None to discover it.
        num_replicas: number of ranks; None to discover it.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: the rank is outside 0..num_replicas-1.
    """
    if rank is None or num_replicas is None:
        found_rank, found_replicas = _discover()
        rank = found_rank if rank is None else rank
        num_replicas = found_replicas if num_replicas is None else num_replicas
    rank, num_replicas = whole_number("rank", rank), whole_number("num_replicas", num_replicas)
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank {rank} is outside 0..{num_replicas - 1} of {num_replicas} ranks: its share of the data "
            "would be empty or another rank's. The rank is the number of the process (RANK), not of the GPU."
        )
    return rank, num_replicas


def _discover() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    names = ("RANK", "WORLD_SIZE")
    found = [name for name in names if name in os.environ]
    if not found:
        return 0, 1
    if len(found) == 1:
        raise ValueError(
            f"{found[0]} is set in the environment but not {next(n for n in names if n not in found)}: "
            "set both (torchrun does), or pass rank and num_replicas."
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def check_rank_unchanged(rank: int, num_replicas: int) -> None:
    """Refuse to go on when a process group was made after `rank` was discovered and says something else."""
    if dist.is_available() and dist.is_initialized():
        now = dist.get_rank(), dist.get_world_size()
        if now != (rank, num_replicas):
            raise ValueError(
                f"the sampler was built for rank {rank} of {num_replicas}, but the process group says rank "
                f"{now[0]} of {now[1]}: data would be repeated or lost. Build the sampler after "
                "init_process_group, or pass rank and num_replicas."
            )


def check_agreement(fingerprint: str, group: dist.ProcessGroup | None = None) -> None:
    """Check once, by one small collective, that every rank plans the same data.

    Args:
        fingerprint: the sampler's `fingerprint`.
        group: the ranks that share the data; None for all.

    Raises:
        ValueError: a rank has another fingerprint; names the ranks and both values.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    everyone: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, fingerprint, group=group)
    other = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if other:
        raise ValueError(
            f"ranks {other} plan other data than rank 0: {everyone[other[0]]} against {everyone[0]}. They "
            "would train overlapping rows or deadlock: give every rank the same data set, capacity and seed."
        )
