"""Which rank this process is, and whether the ranks agree.

Rank and world size come from arguments, else from the process group, else from the environment of torchrun,
else they are 0 and 1. They never come from a device index.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from multipack.arguments import whole_number


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
            f"rank {rank} is outside 0..{num_replicas - 1} of {num_replicas} ranks: its share of the data would be "
            "empty or another rank's. The rank is the number of the process (RANK), not of the GPU."
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
                f"the sampler was built for rank {rank} of {num_replicas}, but the process group says rank {now[0]} of "
                f"{now[1]}: data would be repeated or lost. Build the sampler after init_process_group, or pass rank and "
                "num_replicas."
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
            f"ranks {other} plan other data than rank 0: {everyone[other[0]]} against {everyone[0]}. They would train "
            "overlapping rows or wait for each other for ever: give every rank the same data set, capacity and seed."
        )
