"""Batch samplers that are not ours: what they must keep to, so that ranks can share them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DistributedSampler

from multipack.order.balance import BalanceMode


def check_foreign(batch_sampler: Any, balance: BalanceMode) -> None:
    """Refuse batch samplers whose ranks could not agree."""
    if not isinstance(batch_sampler, Sized):
        raise TypeError(
            f"{type(batch_sampler).__qualname__} has no length, so ranks could not know when to stop. "
            "Give it __len__, or use StreamPacker for data of unknown length."
        )
    if balance != "none":
        raise ValueError(
            f"balance={balance!r} needs the costs of batches, which {type(batch_sampler).__qualname__} does not know. "
            "Use MultipackBatchSampler, or balance='none'."
        )
    for sampler in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"the batch sampler's DistributedSampler already deals rows to {sampler.num_replicas} ranks: each rank would "
                "get a share of its share. Give it a sampler over all rows."
            )
        if getattr(sampler, "generator", ...) is None:
            raise ValueError(
                f"{type(sampler).__qualname__} has no generator: it would draw another order on each rank, and rows would be "
                "repeated and lost. Pass generator=torch.Generator().manual_seed(seed), the same on every rank."
            )


def as_announced(batch_sampler: Any) -> Iterator[list[int]]:
    """The batches of a foreign sampler, which must be as many as its `len` says: steps are planned with it."""
    announced, count = len(batch_sampler), 0
    for batch in batch_sampler:
        count += 1
        if count > announced:
            break
        yield batch
    if count != announced:
        raise ValueError(
            f"{type(batch_sampler).__qualname__} has a length of {announced} but gives {'more' if count > announced else count} "
            "batches: ranks and schedules that count on the length would wait or stop short. Make its __len__ exact."
        )


def order_follows_epoch(batch_sampler: Any) -> bool:
    """Whether a foreign batch sampler has the same order whenever it is at the same epoch."""
    chain = [batch_sampler, getattr(batch_sampler, "sampler", None)]
    return any(hasattr(s, "set_epoch") for s in chain) or all(not hasattr(s, "generator") for s in chain)
