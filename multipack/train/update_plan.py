"""Which sequences of the buffer an optimizer step takes, and how they fall into micro-batches and ranks.

Pure functions of the buffer's lengths and a seed: every rank computes the whole plan and takes its own column, so all
ranks have the same number of micro-batches and no rank asks another.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from multipack.balance import batch_cost, deal
from multipack.packing import pack
from multipack.train.rollouts import IntArray

UpdateMode = Literal["epochs", "steps"]


@dataclass(frozen=True)
class StepPlan:
    """The micro-batches of one optimizer step."""

    micro_batches: list[list[IntArray]]
    """Rows of the buffer by micro-step and rank: `micro_batches[micro_step][rank]`; every rank has something to do."""
    repeated: list[list[bool]]
    """Whether the micro-batch only keeps its rank in step, because there are fewer sequences than ranks: it counts nothing."""

    def __len__(self) -> int:
        return len(self.micro_batches)


def num_optimizer_steps(
    buffer_size: int, train_batch_size: int, mode: UpdateMode, num_update_steps: int
) -> int:
    """Optimizer steps of one update phase.

    "epochs": `num_update_steps` passes over the buffer, each in ceil(buffer / batch) steps, the last one smaller where it
    does not divide. "steps": exactly `num_update_steps`.
    """
    if mode == "steps":
        return num_update_steps
    return num_update_steps * -(-buffer_size // train_batch_size)


def step_rows(
    buffer_size: int, train_batch_size: int, mode: UpdateMode, num_update_steps: int, seed: list[int]
) -> Iterator[IntArray]:
    """Rows of the buffer that each optimizer step takes, in turn.

    "epochs" shuffles the buffer anew for every pass and takes each row once a pass; "steps" draws each step's rows without
    replacement, so a row may come again in another step or not at all.
    """
    rng = np.random.default_rng(seed)
    for _ in range(num_update_steps):
        order = rng.permutation(buffer_size)
        if mode == "steps":
            yield order[:train_batch_size]
        else:
            yield from (
                order[start : start + train_batch_size] for start in range(0, buffer_size, train_batch_size)
            )


def plan_step(
    lengths: IntArray, rows: IntArray, *, micro_batch_tokens: int, num_replicas: int, hidden_size: int
) -> StepPlan:
    """Spread the sequences of one optimizer step over as few equal rounds of micro-batches as hold them.

    Args:
        lengths: tokens of every sequence of the buffer, each at most `micro_batch_tokens`.
        rows: the sequences of this step, at least one.
        micro_batch_tokens: token slots of a micro-batch of one rank.
        num_replicas: number of ranks.
        hidden_size: of the model; says how much attention adds to the cost of a long sequence.
    """
    bins = _even_bins(lengths[rows], micro_batch_tokens, num_replicas)
    num_repeats = -len(bins) % num_replicas
    repeats = bins[:1] * num_repeats
    costs = batch_cost(
        [lengths[rows[b]].sum() for b in bins], [(lengths[rows[b]] ** 2).sum() for b in bins], hidden_size
    )
    # Repeats cost less than anything, so that they share a micro-step.
    dealt = deal(np.concatenate([costs, np.zeros(num_repeats)]), num_replicas, "sorted")
    everything = [rows[b] for b in [*bins, *repeats]]
    return StepPlan(
        micro_batches=[[everything[b] for b in micro_step] for micro_step in dealt],
        repeated=[[bool(b >= len(bins)) for b in micro_step] for micro_step in dealt],
    )


def _even_bins(lengths: IntArray, capacity: int, num_replicas: int) -> list[IntArray]:
    """Bins of similar size, a multiple of the ranks, as few as packing needs; fewer only if there are too few sequences."""
    packing = pack(lengths, capacity, method="best_fit_decreasing")
    packed = [np.asarray(packing[b], np.int64) for b in range(len(packing))]
    num_bins = min(-(-len(packed) // num_replicas) * num_replicas, len(lengths))
    spread = _longest_first(lengths, num_bins)
    if max(int(lengths[rows].sum()) for rows in spread) <= capacity:
        return spread
    return _split_longest(packed, lengths, num_bins)


def _longest_first(lengths: IntArray, num_bins: int) -> list[IntArray]:
    """The longest sequence left goes to the bin with the fewest tokens (Graham 1969); bins may end above the capacity."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, b) for b in range(num_bins)]
    for row in np.argsort(-lengths, kind="stable"):
        tokens, b = heapq.heappop(emptiest)
        bins[b].append(int(row))
        heapq.heappush(emptiest, (tokens + int(lengths[row]), b))
    return [np.array(rows, np.int64) for rows in bins]


def _split_longest(bins: list[IntArray], lengths: IntArray, num_bins: int) -> list[IntArray]:
    """Halve the bins with the most tokens until there are `num_bins`, which is at most the number of sequences."""
    while len(bins) < num_bins:
        widest = max((b for b in range(len(bins)) if len(bins[b]) > 1), key=lambda b: lengths[bins[b]].sum())
        halves = _longest_first(lengths[bins[widest]], 2)
        bins = [*bins[:widest], *(bins[widest][half] for half in halves), *bins[widest + 1 :]]
    return bins
