"""What packing would do with a data set, in numbers.

One rule: the numbers come from the planner and the dealer that training uses, not from formulas about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multipack.data.overlong import Overlong, apply_overlong
from multipack.order.balance import BALANCE_MODES, BalanceMode, batch_cost, deal, loss_of_balance
from multipack.order.packing import MethodName, lower_bound
from multipack.order.plan import EpochPlan
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler

_STEPS_LOOKED_AT = 1000
"""Optimizer steps whose balance is worked out: enough for two digits."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """How the data set would be used."""

    capacity: int
    """Token slots of a bin."""
    ranks: int = 1
    accumulate: int = 1
    """Micro-steps of an optimizer step."""
    bins_per_batch: int = 1
    method: MethodName = "auto"
    seed: int = 0
    overlong: Overlong = "drop"
    """What becomes of rows above the capacity; "error" is not for looking."""
    padded_rows: int | None = None
    """Rows of the padded batches to compare with; None for about as many tokens as a packed batch has."""
    hidden_size: int = 4096
    """Of the model: attention costs length^2 / (12 * hidden_size) of the rest."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The data as they are."""

    rows: int
    tokens: int
    empty: int
    overlong: int
    """Rows above the capacity."""
    lost_tokens: int
    """Tokens that the policy for such rows cuts off or drops."""
    mean: float
    median: float
    percentile_99: float
    longest: int


@dataclass(frozen=True, kw_only=True)
class Bins:
    """The data packed, in the first epoch."""

    sequences: int
    bins: int
    at_least: int
    """No packing needs fewer; see `Packing.lower_bound`."""
    efficiency: float
    """Share of token slots that hold a token, 0..1."""
    best_efficiency: float
    """The same with `at_least` bins."""
    sequences_per_bin: float
    plan_seconds: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """An epoch of training."""

    micro_steps: int
    """Batches of each rank."""
    optimizer_steps: int
    tokens_per_optimizer_step: float
    """Mean over the epoch, all ranks."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Random batches padded to their longest row, as without packing."""

    rows_per_batch: int
    padding_share: float
    """Share of slots that hold no token."""
    sorted_padding_share: float
    """The same for batches of rows of like length, which give up the random order."""
    speed_up: float
    """Compute of the padded batches over that of the packed ones, attention included: what packing saves
    where the GPU is busy."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Time that ranks wait for the slowest, as a share of the time with perfect balance; 0 is best."""

    mode: str
    once_a_step: float
    """Ranks meet at the optimizer step: DDP, ZeRO-1 and 2."""
    every_micro_step: float
    """Ranks meet at every micro-step: FSDP, ZeRO-3."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The answer. `lengths` and `plan` are for pictures."""

    question: Question
    rows: Rows
    bins: Bins
    steps: Steps
    padded: Padded
    balance: tuple[Balance, ...]
    """One of each mode; none where there is one rank only."""
    lengths: NDArray[np.int64]
    plan: EpochPlan


def inspect(lengths: NDArray[np.int64], question: Question) -> Inspection:
    """Plan an epoch over rows of these lengths, and compare.

    Raises:
        ValueError: no row is left to pack, or a rank would have no batch; names the numbers.
    """
    if not lengths.any():
        raise ValueError(f"all {len(lengths)} rows are empty: there is nothing to pack.")
    usable = apply_overlong(lengths, question.capacity, question.overlong)
    packed = usable.lengths
    if not len(packed):
        raise ValueError(
            f"all {len(lengths)} rows are empty or above the capacity of {question.capacity} (the longest "
            f"has {lengths.max()} tokens), so none is left: raise --capacity, or choose --overlong split or "
            "truncate."
        )
    started = perf_counter()
    sampler = MultipackBatchSampler(
        packed,
        question.capacity,
        bins_per_batch=question.bins_per_batch,
        seed=question.seed,
        method=question.method,
    )
    plan = sampler.plan
    assert isinstance(plan, EpochPlan)  # methods that cut rows cannot be asked for here
    num_bins = len(plan)
    plan_seconds = perf_counter() - started
    dealt = DistributedBatchSampler(
        sampler, num_replicas=question.ranks, rank=0, accumulate=question.accumulate
    )
    tokens = int(packed.sum(dtype=np.int64))
    at_least = lower_bound(packed, question.capacity)
    optimizer_steps = -(-len(dealt) // question.accumulate)
    return Inspection(
        question=question,
        rows=Rows(
            rows=len(lengths),
            tokens=int(lengths.sum()),
            empty=usable.report.empty_sequences,
            overlong=usable.report.overlong_sequences,
            lost_tokens=usable.report.lost_tokens,
            mean=float(lengths.mean()),
            median=float(np.median(lengths)),
            percentile_99=float(np.percentile(lengths, 99)),
            longest=int(lengths.max()),
        ),
        bins=Bins(
            sequences=len(packed),
            bins=num_bins,
            at_least=at_least,
            efficiency=tokens / (num_bins * question.capacity),
            best_efficiency=tokens / (at_least * question.capacity),
            sequences_per_bin=len(packed) / num_bins,
            plan_seconds=plan_seconds,
        ),
        steps=Steps(
            micro_steps=len(dealt),
            optimizer_steps=optimizer_steps,
            tokens_per_optimizer_step=tokens / optimizer_steps,
        ),
        padded=_padded(packed, question, num_bins),
        balance=_balance(sampler, question),
        lengths=lengths,
        plan=plan,
    )


def _padded(lengths: NDArray[Any], question: Question, num_bins: int) -> Padded:
    """Random batches of about the tokens of a packed batch, each row padded to the longest of its batch."""
    size = question.padded_rows or max(1, round(len(lengths) * question.bins_per_batch / num_bins))
    shuffled = np.random.default_rng(question.seed).permutation(lengths).astype(np.int64)
    tokens = int(shuffled.sum())
    slots, cost = _padded_work(shuffled, size, question.hidden_size)
    sorted_slots, _ = _padded_work(np.sort(shuffled), size, question.hidden_size)
    packed_cost = float(batch_cost(tokens, int((shuffled * shuffled).sum()), question.hidden_size))
    return Padded(
        rows_per_batch=size,
        padding_share=1 - tokens / slots,
        sorted_padding_share=1 - tokens / sorted_slots,
        speed_up=cost / packed_cost,
    )


def _padded_work(lengths: NDArray[np.int64], size: int, hidden_size: int) -> tuple[int, float]:
    """Slots and cost of batches of `size` rows in this order."""
    starts = np.arange(0, len(lengths), size)
    widths = np.maximum.reduceat(lengths, starts)
    rows = np.minimum(size, len(lengths) - starts)
    slots = rows * widths
    return int(slots.sum()), float(batch_cost(slots, rows * widths * widths, hidden_size).sum())


def _balance(sampler: MultipackBatchSampler, question: Question) -> tuple[Balance, ...]:
    """The loss of each mode over up to a thousand whole optimizer steps, evenly spread."""
    size = question.ranks * question.accumulate
    whole = len(sampler) // size
    if question.ranks == 1 or whole == 0:
        return ()
    picked = np.unique(np.linspace(0, whole - 1, min(whole, _STEPS_LOOKED_AT)).astype(np.int64))
    steps = [
        sampler.order.costs(int(step) * size, (int(step) + 1) * size, question.hidden_size) for step in picked
    ]
    best = sum(costs.sum() for costs in steps) / question.ranks
    return tuple(
        Balance(
            mode=mode,
            once_a_step=_waiting(steps, mode, question, meet_every_micro_step=False) / best,
            every_micro_step=_waiting(steps, mode, question, meet_every_micro_step=True) / best,
        )
        for mode in BALANCE_MODES
    )


def _waiting(
    steps: list[NDArray[np.float64]], mode: BalanceMode, question: Question, *, meet_every_micro_step: bool
) -> float:
    """Time above that of perfect balance, summed over optimizer steps."""
    waiting = 0.0
    for costs in steps:
        dealt = deal(costs, question.ranks, mode, accumulate=question.accumulate)
        loss = loss_of_balance(costs, dealt, meet_every_micro_step=meet_every_micro_step)
        waiting += (loss - 1) * float(costs.sum()) / question.ranks
    return waiting
