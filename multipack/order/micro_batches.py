"""Split the sequences of one optimizer step into equal numbers of micro-batches on every rank, as RL updates
need.

A pure function of the lengths: every rank computes the whole split and takes its own column, so that no rank
waits for another.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multipack.arguments import whole_number
from multipack.order.balance import batch_cost, deal
from multipack.order.batch import BatchIndices
from multipack.order.groups import Groups, as_groups
from multipack.order.packing import as_lengths, check_lengths, checked_capacity, pack

Rows = NDArray[np.int64]


def split_micro_batches(
    lengths: ArrayLike,
    capacity: int,
    *,
    num_replicas: int,
    hidden_size: int = 4096,
    groups: Groups | ArrayLike | None = None,
    multiple_of: int = 1,
) -> list[list[BatchIndices]]:
    """Spread sequences over ranks in as few rounds of micro-batches as hold them, with costs as even as can
    be.

    Args:
        lengths: tokens of every sequence, shape [num_sequences], each in 1..capacity.
        capacity: token slots of a micro-batch of one rank.
        num_replicas: number of ranks.
        hidden_size: of the model; says how much attention adds to the cost of a long sequence.
        groups: one key a sequence, such as its prompt's id: sequences with equal keys share a micro-batch.
        multiple_of: the number of micro-steps is a multiple of this, as interleaved pipelines need.

    Returns:
        Micro-batches by micro-step and rank, `answer[micro_step][rank]`: positions in the lengths, at least
        one. Each sequence is in exactly one that is not `repeated`; those that are only keep their rank in
        step, because there are fewer sequences (or groups) than micro-batches, and count for nothing.

    Raises:
        TypeError: a number is no whole number, or the groups' keys are neither whole numbers nor strings.
        ValueError: there is no sequence, a length or the sum of a group is outside 1..capacity (names it), or
            num_replicas or multiple_of is below 1.
    """
    sizes = as_lengths(lengths)
    if sizes.size == 0 or num_replicas < 1:
        raise ValueError(
            f"{sizes.size} sequences cannot be split over {num_replicas} ranks: no rank would have a "
            "micro-batch."
        )
    check_lengths(sizes, checked_capacity(capacity))
    wide = sizes.astype(np.int64)
    round_of = num_replicas * whole_number("multiple_of", multiple_of, 1)
    if groups is None:
        bins = _even_bins(wide, capacity, round_of)
    else:
        bins = _even_bins_of_groups(wide, capacity, round_of, as_groups(groups))
    num_repeats = -len(bins) % round_of
    costs = batch_cost([wide[b].sum() for b in bins], [(wide[b] ** 2).sum() for b in bins], hidden_size)
    # Repeats cost less than anything, so that they share a micro-step.
    dealt = deal(np.concatenate([costs, np.zeros(num_repeats)]), num_replicas, "micro_step")
    batches = [BatchIndices(rows.tolist(), bin_capacity=capacity) for rows in bins]
    batches += [batches[0].as_repeat()] * num_repeats
    return [[batches[b] for b in micro_step] for micro_step in dealt]


def _even_bins_of_groups(lengths: Rows, capacity: int, round_of: int, groups: Groups) -> list[Rows]:
    tokens = groups.tokens(lengths)
    groups.check_tokens(tokens, capacity)
    return [
        groups.expand(np.array([0, len(content)]), content)[1]
        for content in _even_bins(tokens, capacity, round_of)
    ]


def _even_bins(lengths: Rows, capacity: int, round_of: int) -> list[Rows]:
    """Bins of similar size, a multiple of `round_of`, as few as packing needs; fewer only if there are too
    few sequences."""
    packing = min((pack(lengths, capacity, method=m) for m in ("best_fit_decreasing", "fewest")), key=len)
    packed = [np.asarray(packing[b], np.int64) for b in range(len(packing))]
    num_bins = min(-(-len(packed) // round_of) * round_of, len(lengths))
    spread = _longest_first(lengths, num_bins)
    if max(int(lengths[rows].sum()) for rows in spread) <= capacity:
        return spread
    return _split_longest(packed, lengths, num_bins)


def _longest_first(lengths: Rows, num_bins: int) -> list[Rows]:
    """The longest sequence left goes to the bin with the fewest tokens (Graham 1969); bins may end above the
    capacity."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, b) for b in range(num_bins)]
    for row in np.argsort(-lengths, kind="stable"):
        tokens, b = heapq.heappop(emptiest)
        bins[b].append(int(row))
        heapq.heappush(emptiest, (tokens + int(lengths[row]), b))
    return [np.array(rows, np.int64) for rows in bins]


def _split_longest(bins: list[Rows], lengths: Rows, num_bins: int) -> list[Rows]:
    """Halve the bins with the most tokens until there are `num_bins`, which is at most the number of
    sequences."""
    while len(bins) < num_bins:
        widest = max((b for b in range(len(bins)) if len(bins[b]) > 1), key=lambda b: lengths[bins[b]].sum())
        halves = _longest_first(lengths[bins[widest]], 2)
        bins = [*bins[:widest], *(bins[widest][half] for half in halves), *bins[widest + 1 :]]
    return bins
