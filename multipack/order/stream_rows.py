"""Rows of a stream as a TokenDataset would read them: which columns are token columns, and how to cut
those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

Row: TypeAlias = Mapping[str, Any]
StreamTail: TypeAlias = Literal["pad", "drop"]

_NO_LISTS = (str, bytes, Mapping)


@dataclass(frozen=True)
class PackedRows:
    """The rows of one batch."""

    rows: list[dict[str, Any]]
    numbers: tuple[int, ...]
    """Row of the stream of each."""
    bin_offsets: tuple[int, ...]
    repeated: bool = False


def flattened(row: Any) -> Any:
    """The row with lists of shape (1, L), as tokenizers return them with `return_tensors`, as lists of length
    L."""
    if not isinstance(row, Mapping):
        return row  # refused where its column is looked for
    return {
        key: value[0] if _length(value) == 1 and _holds_numbers(value[0]) else value
        for key, value in row.items()
    }


def cut(row: Row, length: int, start: int, stop: int) -> dict[str, Any]:
    """Tokens start..stop-1 of every token column of a row of `length` tokens; other columns as they are."""
    return {
        key: value[start:stop] if _length(value) == length and _holds_numbers(value) else value
        for key, value in row.items()
    }


def _holds_numbers(value: Any) -> bool:
    """A list or an array of numbers, as far as its first one tells."""
    return _length(value) > 0 and not isinstance(value[0], _NO_LISTS) and np.ndim(value[0]) == 0


def _length(value: Any) -> int:
    """Length of a list or an array, 0 of anything else."""
    if isinstance(value, _NO_LISTS) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        return 0
    return len(value)
