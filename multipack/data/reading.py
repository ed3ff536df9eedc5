"""Values of token columns by the place of their sequences, read by the compiled reader without the GIL."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from multipack import _core
from multipack.data.columns import NumberColumn


class Located(NamedTuple):
    """Where the sequences of a selection are: int64 arrays, one number a sequence."""

    rows: npt.NDArray[np.int64]
    """Row of the table."""
    starts: npt.NDArray[np.int64] | None
    """First token of the row that belongs to the sequence; None: 0 everywhere."""
    lengths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.bool_] | None = None
    """Whether the last token of the sequence is the end token, which no column holds; None: nowhere."""

    @property
    def stored(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence that columns hold."""
        return self.lengths if self.ends is None else self.lengths - self.ends


def read(column: NumberColumn, located: Located) -> torch.Tensor:
    """The tokens of all sequences, one after the other: shape [sum of lengths]."""
    lengths = located.stored
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out = torch.empty(total, dtype=column.dtype)
    gather = _core.Gather(located.rows, located.starts, lengths, ends - lengths, total)
    gather.tokens(column.reader, out.numpy(), 0)
    gather.run()
    return out


def read_scalars(column: NumberColumn, located: Located) -> torch.Tensor:
    """The number of each sequence: shape [number of sequences]."""
    return read(column, Located(located.rows, None, np.ones_like(located.rows)))


def lengths_of(column: NumberColumn, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Values of each of these rows of the table: int64, shape [len(rows)]. Reads offsets, no values."""
    lengths = np.empty(len(rows), np.int64)
    column.reader.lengths(rows, lengths)
    return lengths


def check_equal_lengths(
    name: str, expected: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], first_row: int
) -> None:
    """Raise ValueError for a row whose values are not one a token; `first_row` is the number of the first."""
    wrong = np.flatnonzero(expected != lengths)
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"row {first_row + row} has {expected[row]} tokens but {lengths[row]} values of {name!r}: token "
            "columns need one value a token. Repair the rows, or leave the column out by `columns`."
        )
