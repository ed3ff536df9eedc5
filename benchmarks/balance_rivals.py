"""How others even out the batches of one step over ranks. Each takes costs and a number of ranks and deals as
`multipack.deal` does."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Dealt = npt.NDArray[np.int64]


def heap_longest_first(costs: Costs, num_replicas: int) -> Dealt:
    """Longest processing time first (Graham 1969) with a heap in Python; a rank that has its count takes no
    more."""
    most = len(costs) // num_replicas
    ranks: list[list[int]] = [[] for _ in range(num_replicas)]
    heap = [(0.0, rank) for rank in range(num_replicas)]
    for batch in np.argsort(-costs).tolist():
        total, rank = heapq.heappop(heap)
        ranks[rank].append(batch)
        if len(ranks[rank]) < most:
            heapq.heappush(heap, (total + float(costs[batch]), rank))
    return np.array(ranks).T


def karmarkar_karp(costs: Costs, num_replicas: int) -> Dealt:
    """Largest differencing with equal counts, as RLHF trainers balance micro-batches (Karmarkar and Karp
    1982).

    Starts from groups of one batch for each rank; always merges the two most uneven groups, the largest sum
    of the one with the smallest of the other.
    """
    order = np.argsort(costs).tolist()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), num_replicas)):
        parts = [(float(costs[batch]), [batch]) for batch in order[start : start + num_replicas]]
        heapq.heappush(heap, (parts[0][0] - parts[-1][0], number, parts))
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted((a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True))
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
        number += 1
    return np.array([batches for _, batches in heap[0][2]]).T
