"""Plain-Python answers that the compiled and vectorised code is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def dual_feasible_bound(lengths: Sequence[int], capacity: int) -> int:
    """The best bound of two families of functions, written down as in the survey of Clautiaux, Alves and
    Valerio de
    Carvalho (2010): f_CCM,1 and f_BJ,1, of every whole parameter up to half the capacity."""
    best = 0
    for unit in range(1, capacity // 2 + 1):
        fit, rest = capacity // unit, capacity % unit

        def counting(x: int, unit: int = unit, fit: int = fit) -> int:
            if 2 * x > capacity:
                return 2 * fit - 2 * ((capacity - x) // unit)
            return fit if 2 * x == capacity else 2 * (x // unit)

        def rounding(x: int, unit: int = unit, rest: int = rest) -> int:
            return x // unit * (unit - rest) + max(0, x % unit - rest)

        for weight in counting, rounding:
            best = max(best, -(-sum(map(weight, lengths)) // weight(capacity)))
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


def packed_batch(
    bins: Sequence[Sequence[dict[str, Any]]],
    *,
    slots_of_bin: int | None = None,
    num_slots: int | None = None,
    align_to: int = 1,
    pad_token_id: int = 0,
    ignore_index: int = -100,
    mask_first_label: bool = True,
    position_start: int = 0,
    repeated: bool = False,
) -> dict[str, Any]:
    """Flat values of a batch of bins of rows with `input_ids` and perhaps `labels`, `loss_mask` and `extra`.

    Bins are padded to `slots_of_bin` each, or the whole batch to `num_slots`.
    """
    batch: dict[str, Any] = {name: [] for name in ("input_ids", "labels", "extra", "position_ids", "seq_idx")}
    boundaries, real, targets = [0], [0], 0

    def pad(count: int) -> None:
        batch["input_ids"] += [pad_token_id] * count
        batch["labels"] += [ignore_index] * count
        batch["extra"] += [0] * count

    for sequences in bins:
        first_slot = len(batch["input_ids"])
        number = 0
        for row in sequences:
            ids = row["input_ids"]
            labels = list(row.get("labels", ids))
            if "labels" not in row and "loss_mask" in row:
                labels = [x if keep else ignore_index for x, keep in zip(ids, row["loss_mask"], strict=True)]
            if mask_first_label:
                labels[0] = ignore_index
            if repeated:
                labels = [ignore_index] * len(ids)
            targets += sum(label != ignore_index for label in labels)
            batch["input_ids"] += ids
            batch["labels"] += labels
            batch["extra"] += row.get("extra", [0] * len(ids))
            stored = -(-len(ids) // align_to) * align_to
            pad(stored - len(ids))
            batch["position_ids"] += range(position_start, position_start + stored)
            batch["seq_idx"] += [number] * stored
            number += 1
            boundaries.append(boundaries[-1] + stored)
            real.append(real[-1] + len(ids))
        last = sequences is bins[-1]
        end = (
            first_slot + slots_of_bin if slots_of_bin else num_slots if num_slots and last else boundaries[-1]
        )
        padding = end - boundaries[-1]
        if padding:
            pad(padding)
            batch["position_ids"] += range(position_start, position_start + padding)
            batch["seq_idx"] += [number] * padding
            boundaries.append(end)
    tokens, sequences = (0, 0) if repeated else (real[-1], len(real) - 1)
    counts = {"num_tokens": tokens, "num_sequences": sequences, "num_target_tokens": targets}
    longest = max(b - a for a, b in pairwise(boundaries))
    return {**batch, **counts, "boundaries": boundaries, "real": real, "max_length": longest}
