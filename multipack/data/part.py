"""Row ids that mean a part of the row, and rows with a token behind them that no column holds.

One rule: a part is an int wherever ids are dealt, sorted or counted; whoever reads the row asks which tokens
are meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from typing_extensions import Self


class Part(int):
    """Tokens start .. start + length - 1 of a row."""

    start: int
    length: int

    def __new__(cls, row: int, start: int, length: int) -> Self:
        part = super().__new__(cls, row)
        part.start = start
        part.length = length
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.start, self.length)

    def __repr__(self) -> str:
        return f"Part({int(self)}, start={self.start}, length={self.length})"


class Parts(NamedTuple):
    """Which tokens of several rows are meant: int64 arrays, one number a row."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def parts_of(ids: Sequence[int], lengths: npt.NDArray[Any]) -> Parts | None:
    """Which tokens are meant by ids of which some are parts; None where all are whole rows, of these
    lengths."""
    if not any(isinstance(row, Part) for row in ids):
        return None
    parts = [row if isinstance(row, Part) else Part(row, 0, int(lengths[row])) for row in ids]
    return Parts(
        np.fromiter((part.start for part in parts), np.int64, len(parts)),
        np.fromiter((part.length for part in parts), np.int64, len(parts)),
    )


def with_end(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Lengths of rows with one more token behind each, also behind an empty one."""
    longest = int(lengths.max()) + 1 if len(lengths) else 0
    fits = longest <= np.iinfo(lengths.dtype).max
    wide: npt.NDArray[Any] = lengths if fits else lengths.astype(np.int64)
    return wide + 1


def append_end(row: dict[str, Any], end_token: int | None) -> None:
    """The end token behind one sequence of tensors: also its label, and 0 in any other column."""
    for name, values in row.items():
        value = end_token if name in ("input_ids", "labels") else 0
        row[name] = torch.cat([values, torch.tensor([value], dtype=values.dtype)])
