"""Even out the work of ranks inside one optimizer step.

Gradients of an optimizer step are summed, so the order of its batches is free: dealing them by cost changes
which rank takes which batch and when, never which sequences a step holds.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

BalanceMode: TypeAlias = Literal["none", "micro_step", "step"]
BALANCE_MODES: tuple[BalanceMode, ...] = ("none", "micro_step", "step")


def batch_cost(tokens: ArrayLike, squares: ArrayLike, hidden_size: int = 4096) -> NDArray[np.float64]:
    """Work of a batch in token units: tokens + sum(length^2) / (12 * hidden_size).

    A decoder layer needs 24 * h^2 FLOPs a token in its matrices and 2 * l^2 * h FLOPs in causal attention
    over a sequence of l tokens, a ratio of l^2 / (12 * h).
    """
    return np.asarray(tokens, np.float64) + np.asarray(squares, np.float64) / (12 * hidden_size)


def deal(
    costs: ArrayLike, num_replicas: int, mode: BalanceMode, *, accumulate: int | None = None, window: int = 1
) -> NDArray[np.int64]:
    """Deal batches to micro-steps and ranks.

    Args:
        costs: cost of each batch in the order of the plan, shape [num_batches].
        num_replicas: number of ranks.
        mode: "none" deals in turn; "micro_step" gives the ranks of a micro-step neighbours by cost, for FSDP
            and ZeRO-3, whose ranks meet every micro-step; "step" gives every rank the same number of batches
            and nearly the same sum (longest processing time first, Graham 1969, then exchanges), for DDP and
            ZeRO-1/2, whose ranks meet once a step.
        accumulate: micro-steps of an optimizer step; None when all batches belong to one step.
        window: optimizer steps between which batches may move. Above 1, the batches of so many steps are cut
            into strata by cost, and each step takes one group of every stratum, in a low-discrepancy order.

    Returns:
        Batch of each micro-step and rank, shape [num_batches // num_replicas, num_replicas]. What does not
        fill a micro-step is left out: the last batches of the plan, or the cheapest ones of the last step
        when sorting.

    Raises:
        ValueError: an unknown mode, or num_replicas, accumulate or window below 1.
    """
    work = np.asarray(costs, np.float64)
    if mode not in BALANCE_MODES:
        raise ValueError(f"balance mode {mode!r} is none of {', '.join(BALANCE_MODES)}.")
    if num_replicas < 1 or window < 1 or (accumulate is not None and accumulate < 1):
        raise ValueError(
            f"num_replicas={num_replicas}, accumulate={accumulate} and window={window} must be at least 1."
        )
    step = max(1, len(work)) if accumulate is None else accumulate * num_replicas
    order = np.arange(len(work), dtype=np.int64)
    if window > 1 and mode != "none" and len(work) == window * step:
        order = _stratify(work, num_replicas, window)
    if mode == "none":
        return order[: len(work) // num_replicas * num_replicas].reshape(-1, num_replicas)
    dealt = [_deal_step(work, order[i : i + step], num_replicas, mode) for i in range(0, len(work), step)]
    return np.concatenate(dealt) if dealt else np.empty((0, num_replicas), np.int64)


def _deal_step(
    work: NDArray[np.float64], batches: NDArray[np.int64], num_replicas: int, mode: BalanceMode
) -> NDArray[np.int64]:
    num_micro_steps = len(batches) // num_replicas
    dearest_first = batches[np.argsort(-work[batches], kind="stable")]
    order = dearest_first[: num_micro_steps * num_replicas].reshape(num_micro_steps, num_replicas)
    if mode == "step" and num_micro_steps:
        return _exchange(work, _longest_first(work, order))
    # Every other micro-step is dealt backwards, so that no rank always has the dearest.
    order[1::2] = order[1::2, ::-1].copy()
    return order


def _stratify(work: NDArray[np.float64], num_replicas: int, window: int) -> NDArray[np.int64]:
    """Order batches so that each of `window` steps holds one group of neighbours by cost from every
    stratum."""
    groups = np.argsort(-work, kind="stable").reshape(
        -1, window, num_replicas
    )  # [stratum, place in it, rank]
    places = _bit_reversed(window)
    # Odd strata run backwards: a step with the dearest group of one stratum has the cheapest of the next.
    picked = [stratum[places if j % 2 == 0 else places[::-1]] for j, stratum in enumerate(groups)]
    return np.stack(picked, axis=1).ravel()


def _bit_reversed(size: int) -> NDArray[np.int64]:
    """A low-discrepancy order of 0..size-1 (van der Corput)."""
    bits = max(1, (size - 1).bit_length())
    reversed_ = [int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits)]
    return np.array([i for i in reversed_ if i < size], np.int64)


def _longest_first(work: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Micro-step by micro-step, the rank with the smallest sum takes the dearest batch left."""
    sums = np.zeros(order.shape[1])
    dealt = np.empty_like(order)
    for micro_step, batches in enumerate(order):
        ranks = np.argsort(sums, kind="stable")
        dealt[micro_step, ranks] = batches
        sums[ranks] += work[batches]
    return dealt


def _exchange(work: NDArray[np.float64], dealt: NDArray[np.int64]) -> NDArray[np.int64]:
    """Swap batches between the slowest and the fastest rank while that brings the two together."""
    sums = work[dealt].sum(axis=0)
    for _ in range(4 * len(sums)):
        slow, fast = int(sums.argmax()), int(sums.argmin())
        gap = sums[slow] - sums[fast]
        moved = work[dealt[:, slow]][:, None] - work[dealt[:, fast]][None, :]
        i, j = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 0 < moved[i, j] < gap:
            break
        dealt[i, slow], dealt[j, fast] = dealt[j, fast], dealt[i, slow]
        sums[slow] -= moved[i, j]
        sums[fast] += moved[i, j]
    return dealt


def loss_of_balance(costs: ArrayLike, dealt: NDArray[Any], *, meet_every_micro_step: bool) -> float:
    """Time of a step over the time it would take with perfect balance, 1 or more: the slowest rank over the
    mean.

    Args:
        costs: cost of each batch.
        dealt: answer of `deal`.
        meet_every_micro_step: ranks wait for each other after each micro-step (FSDP, ZeRO-3), or once a step
            (DDP).
    """
    work = np.asarray(costs, np.float64)[dealt]
    slowest = work.max(axis=1).sum() if meet_every_micro_step else work.sum(axis=0).max()
    return float(slowest / (work.sum() / work.shape[1]))
