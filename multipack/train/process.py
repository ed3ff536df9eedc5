"""The ranks of a run: started by torchrun, or alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

_FAREWELL_S = 0.5
"""gloo's threads drop the tensors of the last collectives a little later, and need the interpreter for it:
one that is ending kills them and itself (`terminate called without an active exception`), which befell one
run in twenty on busy machines."""


_RANK_0_SPEAKS_S = 5.0
"""How long other ranks leave an error to rank 0; torchrun looks at its processes ten times a second."""


class RunError(RuntimeError):
    """What the run was given cannot be trained on; a sentence that the user can act upon. The same on every
    rank."""


@contextlib.contextmanager
def one_sentence(command: str, *errors: type[Exception]) -> Iterator[None]:
    """End the process with an error of the user's as one sentence, once for all ranks.

    Rank 0 says it at once, and torchrun then ends the others, which therefore wait a moment before they say
    what only they met.

    Raises:
        SystemExit: in the place of one of `errors`.
    """
    try:
        yield
    except errors as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            time.sleep(_RANK_0_SPEAKS_S)
        of = f", rank {rank}" if rank else ""
        raise SystemExit(f"{command}{of}: {error}") from error


@contextlib.contextmanager
def process_group(timeout_s: float = 1800.0) -> Iterator[torch.device]:
    """Join the ranks that torchrun started, or make a group of one; gives this rank's device and leaves the
    group at the end.

    A rank that waits for another one for more than `timeout_s` seconds ends with an error: a host that is cut
    off says nothing. Small integers are summed over gloo on the CPU, so that counting tokens never waits for
    the GPU. An error on one of several ranks ends its process without a farewell, which is how the others
    notice.
    """
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:  # transformers imports DeepSpeed where it is installed, which would warn that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield device
        leave_process_group()
        return
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def leave_process_group() -> None:
    """Leave the group once all ranks are here, and give gloo the moment it needs. All ranks together, before
    the process ends."""
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(_FAREWELL_S)


def sum_over_ranks(*counts: int) -> list[int]:
    """Each count summed over all ranks, in 64 bits; one small collective on the CPU."""
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total)
    sums: list[int] = total.tolist()
    return sums
