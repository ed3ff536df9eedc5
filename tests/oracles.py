"""Plain-Python answers that the compiled and vectorised code is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def next_fit(lengths: Sequence[int], capacity: int, limit: int | None = None) -> list[list[int]]:
    """Each row goes into the last bin, or opens a new one."""
    bins: list[list[int]] = []
    used = 0
    for row, length in enumerate(lengths):
        if not bins or used + length > capacity or len(bins[-1]) == limit:
            bins.append([])
            used = 0
        bins[-1].append(row)
        used += length
    return bins


def best_fit_decreasing(lengths: Sequence[int], capacity: int, limit: int | None = None) -> list[list[int]]:
    """Longest first, each into the fullest bin that can hold it."""
    bins: list[list[int]] = []
    rest: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fits = [
            b for b in range(len(bins)) if rest[b] >= lengths[row] and (limit is None or len(bins[b]) < limit)
        ]
        if fits:
            best = min(fits, key=lambda b: rest[b])
        else:
            best = len(bins)
            bins.append([])
            rest.append(capacity)
        bins[best].append(row)
        rest[best] -= lengths[row]
    return bins


def martello_toth_bound(lengths: Sequence[int], capacity: int) -> int:
    """L2 from its definition, over every threshold."""
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [x for x in lengths if x > capacity - threshold]
        large = [x for x in lengths if capacity - threshold >= x > capacity / 2]
        small = [x for x in lengths if capacity / 2 >= x >= threshold]
        overflow = sum(small) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-overflow // capacity)))
    return best


def gathered(
    rows: list[list[Any]],
    ids: list[int],
    starts: list[int],
    lengths: list[int],
    places: list[int],
    num_slots: int,
    fill: Any,
) -> list[Any]:
    out = [fill] * num_slots
    for row, start, length, place in zip(ids, starts, lengths, places, strict=True):
        out[place : place + length] = rows[row][start : start + length]
    return out


def gathered_labels(
    rows: list[list[Any]],
    masks: list[list[list[bool]]],
    ids: list[int],
    starts: list[int],
    lengths: list[int],
    places: list[int],
    num_slots: int,
    ignore_index: int,
    mask_first: bool,
) -> list[Any]:
    out = [ignore_index] * num_slots
    for row, start, length, place in zip(ids, starts, lengths, places, strict=True):
        for i in range(length):
            if all(mask[row][start + i] for mask in masks) and not (mask_first and i == 0):
                out[place + i] = rows[row][start + i]
    return out


def segments(sizes: list[int], first_position: int, slots_per_row: int) -> tuple[list[int], list[int]]:
    """Positions, and the number of the segment within its row of the batch, of each slot."""
    positions: list[int] = []
    numbers: list[int] = []
    number = 0
    for size in sizes:
        number = 0 if len(positions) % slots_per_row == 0 else number + 1
        positions += range(first_position, first_position + size)
        numbers += [number] * size
    return positions, numbers
