"""What ranks tell each other between generation and updates: whether all went well, then ragged arrays.

Lengths go first, so every rank knows the size of every share, and each array then crosses the wire once,
unpadded. All of it stays on the CPU, where experience lives: a few bytes a token.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from multipack.train.process import RunError

Scalar = TypeVar("Scalar", bound=np.generic)


@contextlib.contextmanager
def together(doing: str, *, of_user: bool = False) -> Iterator[None]:
    """Meet all ranks at the end of the block; an error in it, on any rank, is an error on every rank.

    Args:
        doing, of_user: see `raise_everywhere`.

    Raises:
        RuntimeError: see `raise_everywhere`.
    """
    error = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001  (every rank raises it)
        error = raised
    raise_everywhere(error, doing, of_user=of_user)


def raise_everywhere(error: Exception | None, doing: str, *, of_user: bool = False) -> None:
    """Meet all ranks; if any of them brings an error, raise on every rank, so that none waits for a dead one.

    Args:
        error: what went wrong on this rank, or None.
        doing: what the ranks were doing, for the message.
        of_user: whether the cause is what the run was given, which a sentence explains better than a
            traceback.

    Raises:
        RuntimeError: some rank failed; the message names the ranks and their errors. The rank's own error is
            the cause. With `of_user` it is a RunError.
    """
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
    if failed:
        raise (RunError if of_user else RuntimeError)(
            f"{doing} failed on {len(failed)} of {len(messages)} ranks; {'; '.join(failed)}"
        ) from error


def gather_counts(count: int) -> list[int]:
    """Every rank's `count`, in order of ranks."""
    return [int(n) for n in gather_ragged(np.array([count], np.int64), [1] * dist.get_world_size())]


def gather_ragged(local: npt.NDArray[Scalar], counts: Sequence[int]) -> npt.NDArray[Scalar]:
    """The arrays of all ranks, one after the other in order of ranks.

    Each rank's share is broadcast from it straight into its place, so nothing is padded.

    Args:
        local: this rank's share, shape [counts[rank]].
        counts: every rank's number of elements, the same on all ranks.

    Raises:
        ValueError: the share has another size than was announced; the other ranks would read past its end.
    """
    rank = dist.get_rank()
    if local.shape != (counts[rank],):
        raise ValueError(f"Rank {rank} announced {counts[rank]} elements and brings the shape {local.shape}.")
    ends = np.cumsum([0, *counts])
    gathered = np.empty(int(ends[-1]), local.dtype)
    gathered[ends[rank] : ends[rank + 1]] = local
    pending = [
        dist.broadcast(torch.from_numpy(gathered[start:end].view(np.uint8)), src=source, async_op=True)
        for source, (start, end) in enumerate(itertools.pairwise(ends))
        if start < end
    ]
    for work in pending:
        work.wait()
    return gathered
