"""The sequences of rows that someone else packed: where each begins and how long it is.

>>> of_lengths(np.array([2, 3]), np.array([2]), np.array([5]), 0)     # one row of 5 tokens, seq_lengths [2, 3]
rows    0 0
starts  0 2
lengths 2 3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multipack.data.columns import NumberColumn
from multipack.data.reading import Located, check_equal_lengths, lengths_of, read

PACKED = ("seq_lengths", "position_ids")
"""Columns that say where the sequences of a row begin: their lengths, or positions that begin again at 0."""

_ROWS_AT_ONCE = 4096

Ints = npt.NDArray[np.int64]


class Sequences(NamedTuple):
    """Sequences in rows: int64 arrays, one number a sequence."""

    rows: Ints
    starts: Ints
    """First token in the row."""
    lengths: Ints


def packed_sequences(
    boundaries: Mapping[str, NumberColumn], lengths: npt.NDArray[Any], index_map: Ints | None
) -> Sequences | None:
    """The sequences inside all rows of a source; None: no column says that there are any.

    Args:
        boundaries: those of `PACKED` that the source has.
        lengths: tokens of each row, shape [num_rows].
        index_map: the table row of each row; None: row i is table row i.

    Raises:
        ValueError: boundaries contradict the tokens or each other; names the row.
    """
    if not boundaries:
        return None
    parts = [Sequences(*(np.zeros(0, np.int64) for _ in range(3)))]
    for first in range(0, len(lengths), _ROWS_AT_ONCE):
        tokens = lengths[first : first + _ROWS_AT_ONCE].astype(np.int64)
        numbers = np.arange(first, first + len(tokens))
        rows = numbers if index_map is None else index_map[numbers]
        found = []
        if "seq_lengths" in boundaries:
            column = boundaries["seq_lengths"]
            counts = lengths_of(column, rows)
            found.append(of_lengths(read(column, Located(rows, None, counts)).numpy(), counts, tokens, first))
        if "position_ids" in boundaries:
            column = boundaries["position_ids"]
            check_equal_lengths("position_ids", tokens, lengths_of(column, rows), first)
            found.append(of_positions(read(column, Located(rows, None, tokens)).numpy(), tokens, first))
        parts.append(agree(found))
    return Sequences(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def of_lengths(values: Ints, counts: Ints, row_lengths: Ints, first_row: int) -> Sequences:
    """Sequences by `seq_lengths`.

    Args:
        values: the lengths of all rows, one after the other, shape [sum of counts].
        counts: how many of them each row has, shape [num_rows].
        row_lengths: tokens of each row, shape [num_rows].
        first_row: number of the first row, for messages.

    Raises:
        ValueError: the lengths of a row do not add up to its tokens; names the row.
    """
    ends = np.cumsum(counts)
    total = np.concatenate(([0], np.cumsum(values)))
    sums = total[ends] - total[ends - counts]
    wrong = np.flatnonzero((sums != row_lengths) | _any_negative(values, ends, counts))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"row {first_row + row}: seq_lengths add up to {sums[row]}, and the row has {row_lengths[row]} "
            "tokens, so its sequences cannot be told apart. Repair the rows, or leave the column out by "
            "`columns`."
        )
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = total[:-1] - total[(ends - counts)[rows]]
    kept = values > 0
    return Sequences(first_row + rows[kept], starts[kept], values[kept])


def of_positions(positions: Ints, row_lengths: Ints, first_row: int) -> Sequences:
    """Sequences by `position_ids`: each begins where the position is 0.

    Args:
        positions: of all tokens of all rows, shape [sum of row_lengths].
        row_lengths: tokens of each row, shape [num_rows].
        first_row: number of the first row, for messages.

    Raises:
        ValueError: a row does not begin at 0, or positions neither count on nor begin again; names the row.
    """
    ends = np.cumsum(row_lengths)
    begins = np.zeros(len(positions), np.bool_)
    begins[(ends - row_lengths)[row_lengths > 0]] = True
    counted = np.empty(len(positions), np.bool_)
    counted[1:] = positions[1:] == positions[:-1] + 1
    wrong = np.flatnonzero((positions != 0) & (begins | ~counted))
    if len(wrong):
        row = int(np.searchsorted(ends, wrong[0], side="right"))
        raise ValueError(
            f"row {first_row + row}: position_ids have {positions[wrong[0]]} at token "
            f"{wrong[0] - (ends - row_lengths)[row]}; they must begin at 0 and count on, or begin again at "
            "0. Repair the rows, or leave the column out by `columns`."
        )
    places = np.flatnonzero(positions == 0)
    rows = np.searchsorted(ends, places, side="right")
    stops = np.append(places[1:], len(positions))
    return Sequences(first_row + rows, places - (ends - row_lengths)[rows], stops - places)


def agree(found: list[Sequences]) -> Sequences:
    """The sequences that all columns say.

    Raises:
        ValueError: they differ.
    """
    first, *others = found
    for other in others:
        if not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)):
            raise ValueError(
                f"{' and '.join(PACKED)} put the boundaries of sequences in different places. Leave one of "
                "them out by `columns`."
            )
    return first


def _any_negative(values: Ints, ends: Ints, counts: Ints) -> npt.NDArray[np.bool_]:
    """Rows with a negative number among their values."""
    negative = np.concatenate(([0], np.cumsum(values < 0)))
    differs: npt.NDArray[np.bool_] = negative[ends] != negative[ends - counts]
    return differs
