"""What becomes of the rows that no bin can hold: empty ones, and those above the longest length allowed.

Nothing is lost silently: every sequence and token that does not come through is counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from multipack.arguments import check_choice, whole_number

Overlong = Literal["error", "truncate", "split", "drop"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What became of the rows of a source. Sequences and tokens are counted apart."""

    num_sequences: int
    """Usable sequences: what `len()` of the data set says. A split row counts once for each fragment."""
    num_tokens: int
    """Tokens of the usable sequences."""
    empty_sequences: int = 0
    """Rows without a token, left out because a bin cannot hold them."""
    overlong_sequences: int = 0
    """Rows above `max_length`, which were truncated, split or dropped."""
    lost_tokens: int = 0
    """Tokens that were cut off or dropped. Above 1 % of `num_tokens`: raise `max_length` or split."""
    num_target_tokens: int | None = None
    """Tokens that are learnt in an epoch; None: not counted (`without_targets="keep"`)."""
    sequences_without_targets: int = 0
    """Sequences without a token to learn, which were left out; never counted under "keep"."""
    tokens_without_targets: int = 0
    """Tokens of those. They are not among `lost_tokens`."""


class Usable(NamedTuple):
    """The sequences of a data set, one number each, and the report on the others."""

    rows: npt.NDArray[np.int64] | None
    """Row of the source; None: sequence i is row i."""
    starts: npt.NDArray[np.int64] | None
    """First token in the row; None: 0 everywhere."""
    lengths: npt.NDArray[Any]
    """Tokens, at least 1; uint16, uint32 or int64."""
    report: DatasetReport


def apply_overlong(lengths: npt.NDArray[Any], max_length: int | None, overlong: Overlong) -> Usable:
    """The sequences that may enter a bin.

    Args:
        lengths: tokens of every row of a source, shape [num_rows], any integer dtype.
        max_length: longest sequence in tokens; None: no bound.
        overlong: what to do with longer rows: "error", "truncate", "split" or "drop".

    Raises:
        ValueError: a row is longer under "error", or an argument is out of range.
    """
    max_length = None if max_length is None else whole_number("max_length", max_length, 1)
    check_choice("overlong", overlong, get_args(Overlong))
    num_empty = len(lengths) - int(np.count_nonzero(lengths))
    long = np.zeros(0, np.int64) if max_length is None else np.flatnonzero(lengths > max_length)
    all_tokens = int(lengths.sum(dtype=np.int64))
    rows: npt.NDArray[np.int64] | None = None
    starts: npt.NDArray[np.int64] | None = None
    if len(long) and max_length is not None:
        if overlong == "error":
            raise ValueError(
                f"{len(long)} of {len(lengths)} rows are above max_length={max_length} (row {long[0]} is the "
                f"first, the longest has {int(lengths.max())} tokens) and would fit no bin. Raise max_length "
                "and the capacity, or choose overlong='truncate', 'split' or 'drop'."
            )
        if overlong == "truncate":
            lengths = np.minimum(lengths, max_length)
        elif overlong == "split":
            rows, starts, lengths = _split(lengths, max_length)
        else:
            lengths = lengths.copy()
            lengths[long] = 0
    if rows is None and not lengths.all():
        rows = np.flatnonzero(lengths)
        lengths = lengths[rows]
    lengths = narrow(lengths)
    num_tokens = int(lengths.sum(dtype=np.int64))
    report = DatasetReport(
        num_sequences=len(lengths),
        num_tokens=num_tokens,
        empty_sequences=num_empty,
        overlong_sequences=len(long),
        lost_tokens=all_tokens - num_tokens,
    )
    return Usable(rows, starts, lengths, report)


def _split(
    lengths: npt.NDArray[Any], max_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Fragments of at most max_length tokens: row, first token, length. Empty rows have none."""
    whole = lengths.astype(np.int64)
    counts = -(-whole // max_length)
    rows = np.repeat(np.arange(len(lengths)), counts)
    fragment = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = fragment * max_length
    return rows, starts, np.minimum(whole[rows] - starts, max_length)


def narrow(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same lengths in the smallest of uint16, uint32 and their own dtype that fits."""
    longest = int(lengths.max()) if len(lengths) else 0
    for dtype in (np.uint16, np.uint32):
        if longest <= np.iinfo(dtype).max:
            return lengths.astype(dtype, copy=False)
    return lengths


def log_report(report: DatasetReport, overlong: Overlong, max_length: int | None) -> None:
    if report.overlong_sequences:
        done = {"truncate": "truncated", "split": "split", "drop": "dropped"}[overlong]
        _logger.warning(
            "%d rows above max_length=%d were %s; %d tokens are lost.",
            report.overlong_sequences,
            max_length,
            done,
            report.lost_tokens,
        )
    if report.sequences_without_targets:
        _logger.warning(
            "%d sequences (%d tokens) have no token to learn%s and are left out.",
            report.sequences_without_targets,
            report.tokens_without_targets,
            " within max_length" if report.overlong_sequences else "",
        )
    if report.empty_sequences:
        _logger.info("%d empty rows are left out.", report.empty_sequences)
