"""Rows that are tokens already, also several sequences to a row, packed by someone else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from multipack.data.targets import MASKS
from multipack.data.text.labels import IGNORED, Encoded

_LARGEST = 2**31 - 1


def encode_tokens(row: Mapping[str, Any]) -> list[Encoded]:
    """The sequences of a row of tokens.

    Args:
        row: `input_ids`, and maybe `labels` or masks of what is learnt, `attention_mask` (0: padding, which
            is left out; above 1: the number of the sequence), `position_ids` (0 begins a sequence) and
            `seq_lengths`, which are boundaries.

    Raises:
        ValueError: columns differ in length, an id is no id, or boundaries contradict each other.
        TypeError: a column is no list of numbers.
    """
    ids = [_id(value, place, "input_ids", 0) for place, value in enumerate(_list(row, "input_ids") or [])]
    labels = _labels(row, ids)
    mask = _numbers(row, "attention_mask", len(ids))
    bounds = _bounds(row, len(ids), mask)
    sequences = []
    for first, last in pairwise(bounds):
        kept = [place for place in range(first, last) if mask is None or mask[place] != 0]
        if kept:
            sequences.append(Encoded([ids[place] for place in kept], [labels[place] for place in kept]))
    return sequences or [Encoded([], [])]


def _labels(row: Mapping[str, Any], ids: Sequence[int]) -> list[int]:
    given = _list(row, "labels")
    if given is not None:
        _check_length("labels", given, len(ids))
        labels = [
            IGNORED if value == IGNORED else _id(value, place, "labels", 0)
            for place, value in enumerate(given)
        ]
    else:
        labels = list(ids)
    for name in MASKS:
        mask = _numbers(row, name, len(ids))
        if mask is not None:
            labels = [label if learnt else IGNORED for label, learnt in zip(labels, mask, strict=True)]
    return labels


def _bounds(row: Mapping[str, Any], num_tokens: int, mask: Sequence[int] | None) -> list[int]:
    """First token of each sequence, and the number of tokens."""
    found: dict[str, list[int]] = {}
    lengths = _list(row, "seq_lengths")
    if lengths is not None:
        lengths = [_id(value, place, "seq_lengths", 0) for place, value in enumerate(lengths)]
        if sum(lengths) != num_tokens:
            raise ValueError(
                f"seq_lengths add up to {sum(lengths)}, and the row has {num_tokens} tokens. Correct it."
            )
        starts = [sum(lengths[:i]) for i, length in enumerate(lengths) if length]
        found["seq_lengths"] = [*starts, num_tokens]
    positions = _numbers(row, "position_ids", num_tokens)
    if positions is not None:
        found["position_ids"] = [*_restarts(positions, mask), num_tokens]
    if mask is not None and max(mask, default=0) > 1:
        found["attention_mask"] = [
            *(place for place in range(num_tokens) if place == 0 or mask[place] != mask[place - 1]),
            num_tokens,
        ]
    if len({tuple(_of_tokens(bounds, mask)) for bounds in found.values()}) > 1:
        raise ValueError(
            f"{' and '.join(found)} put the boundaries of its sequences in different places. Keep one of "
            "them."
        )
    return next(iter(found.values()), [0, num_tokens])


def _restarts(positions: Sequence[int], mask: Sequence[int] | None) -> list[int]:
    """Where positions do not count on from the token before; padding may hold any."""
    starts = []
    for place, position in enumerate(positions):
        padding = mask is not None and mask[place] == 0
        after_padding = place > 0 and mask is not None and mask[place - 1] == 0
        if place == 0 or (not padding and (after_padding or position != positions[place - 1] + 1)):
            starts.append(place)
            if position != 0 and not padding and place:
                raise ValueError(
                    f"position_ids go from {positions[place - 1]} to {position} at token {place}: they must "
                    "count on, or begin again at 0. Remove the column."
                )
    return starts


def _of_tokens(bounds: Sequence[int], mask: Sequence[int] | None) -> list[int]:
    """Boundaries counted in tokens that are no padding."""
    if mask is None:
        return list(bounds)
    before = [0]
    for value in mask:
        before.append(before[-1] + (value != 0))
    return sorted({before[place] for place in bounds})


def _list(row: Mapping[str, Any], name: str) -> list[Any] | None:
    value = row.get(name)
    if isinstance(value, str):  # of a file of plain text
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = row[name]
    if value is None:
        if name == "input_ids":
            raise TypeError("input_ids is None, not a list of tokens. Remove the row or fill the cell.")
        return None
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # (1, L), as tokenizers return it with return_tensors
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {str(value)[:80]!r}, not a list of numbers. Correct or remove it.")
    return list(value)


def _numbers(row: Mapping[str, Any], name: str, num_tokens: int) -> list[int] | None:
    values = _list(row, name)
    if values is None:
        return None
    _check_length(name, values, num_tokens)
    return [_id(value, place, name, 0) for place, value in enumerate(values)]


def _check_length(name: str, values: Sequence[Any], num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise ValueError(f"it has {num_tokens} tokens but {len(values)} values of {name}. Repair the row.")


def _id(value: Any, place: int, name: str, least: int) -> int:
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if not isinstance(value, int) or not least <= value <= _LARGEST:
        what = f"outside {least}..{_LARGEST}" if isinstance(value, int) else "not a whole number"
        raise ValueError(
            f"token {place} of {name} is {value!r}, {what}: no vocabulary holds it. Correct the row."
        )
    return value
