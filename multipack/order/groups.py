"""Rows that stay together: pairs of a preference, answers to one prompt, turns of one conversation.

The planner packs groups as if each were one sequence of all its tokens and expands them afterwards, so that
the rows of a group share a bin, beside each other and in the order of the source. One rule: a group is named
by the order of first appearance of its key, so the same keys give the same groups in every process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Groups:
    """Which rows belong together.

    Rows with equal keys are one group, wherever they stand; groups are numbered by their first rows.

    Args:
        keys: one value a row, shape [num_rows]: whole numbers or strings, such as the ids of prompts.

    Raises:
        TypeError: the keys are neither whole numbers nor strings.
        ValueError: the keys are not one value a row.

    ```
    >>> groups = Groups(["a", "a", "b", "a"])
    row               0  1  2  3
    group             0  0  1  0
    groups.rows(0)    0  1  3
    ```
    """

    def __init__(self, keys: ArrayLike) -> None:
        values = _checked_keys(keys)
        runs = np.flatnonzero(np.concatenate([[values.size > 0], values[1:] != values[:-1]]))
        self.names: NDArray[Any] = values[runs]
        """The key of each group, shape [num_groups]."""
        self.starts: NDArray[np.int64] = np.append(runs, values.size)
        """Group g holds starts[g + 1] - starts[g] rows; shape [num_groups + 1]."""
        # Rows by group, and the group of each row; None where each group is one run of rows.
        self._order: NDArray[np.int64] | None = None
        self._of_row: NDArray[np.int64] | None = None
        if not _rises(self.names):
            self._join(np.argsort(self.names, kind="stable"))

    def _join(self, by_key: NDArray[np.int64]) -> None:
        """Make runs of rows with equal keys one group, from the runs by their keys."""
        sorted_keys = self.names[by_key]
        first = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]]))
        if len(first) == len(by_key):
            return
        num_runs = np.diff(np.append(first, len(by_key)))
        by_first_row = np.argsort(by_key[first])
        first, num_runs = first[by_first_row], num_runs[by_first_row]
        runs = by_key[_places(first, num_runs)]
        self._order = _places(self.starts[runs], np.diff(self.starts)[runs])
        in_order = np.cumsum(np.diff(self.starts)[runs])
        self.starts = np.concatenate([[0], in_order[np.cumsum(num_runs) - 1]])
        self.names = sorted_keys[first]
        self._of_row = np.empty_like(self._order)
        self._of_row[self._order] = np.repeat(np.arange(len(first)), np.diff(self.starts))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_rows(self) -> int:
        """Number of rows in all groups."""
        return int(self.starts[-1])

    @property
    def largest(self) -> int:
        """Most rows of a group."""
        return int(np.diff(self.starts).max(initial=0))

    def rows(self, group: int) -> NDArray[np.int64]:
        """Rows of a group in their order in the source."""
        _, rows = self.expand(np.array([0, 1]), np.array([group]))
        return rows

    def of(self, rows: ArrayLike) -> NDArray[np.int64]:
        """The group of each of `rows`, same shape."""
        wanted = np.asarray(rows, np.int64)
        if self._of_row is not None:
            return self._of_row[wanted]
        return np.searchsorted(self.starts, wanted, side="right") - 1

    def tokens(self, lengths: NDArray[Any]) -> NDArray[np.int64]:
        """Sum of the rows' lengths of each group, shape [num_groups]."""
        self.check_rows(len(lengths))
        if len(self) == 0:
            return np.empty(0, np.int64)
        ordered = lengths if self._order is None else lengths[self._order]
        return np.add.reduceat(ordered, self.starts[:-1], dtype=np.int64)

    def expand(
        self, offsets: NDArray[np.int64], groups: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bins of rows from bins of groups: offsets and row ids as in `Packing`."""
        first = self.starts[groups]
        sizes = self.starts[groups + 1] - first
        ends = np.concatenate([[0], np.cumsum(sizes)])
        places = _places(first, sizes)
        return ends[offsets], places if self._order is None else self._order[places]

    def check_rows(self, num_rows: int) -> None:
        """Refuse groups of another number of rows."""
        if self.num_rows != num_rows:
            raise ValueError(
                f"together has {self.num_rows} keys for {num_rows} rows: some rows would belong to no group. "
                "Pass one key a row, in the order of the rows."
            )

    def check_tokens(self, tokens: NDArray[np.int64], capacity: int) -> None:
        """Refuse groups that no bin can hold, naming the first."""
        over = tokens > capacity
        if over.any():
            g = int(np.argmax(over))
            rows = self.rows(g)
            raise ValueError(
                f"group {self.names[g]!s} has {int(tokens[g])} tokens in {len(rows)} rows (the first is row "
                f"{int(rows[0])}), above the capacity of {capacity}; {int(over.sum())} groups are too long, "
                f"the longest has {int(tokens.max())}. Their rows could not share a bin: raise the capacity, "
                "shorten the rows (max_length of TokenDataset), or leave these groups out."
            )

    def limit(self, max_sequences_per_bin: int | None) -> int | None:
        """Most groups of a bin that keep a limit on its sequences, whichever groups they are.

        Raises:
            ValueError: the largest group alone is above the limit.
        """
        if max_sequences_per_bin is None or len(self) == 0:
            return max_sequences_per_bin
        if self.largest > max_sequences_per_bin:
            g = int(np.argmax(np.diff(self.starts)))
            raise ValueError(
                f"group {self.names[g]!s} has {self.largest} rows, above "
                f"max_sequences_per_bin={max_sequences_per_bin}: they could not share a bin. Raise the limit "
                f"to {self.largest}, or leave such groups out."
            )
        return max_sequences_per_bin // self.largest

    def digest(self) -> str:
        """Digest of who belongs to whom; the names do not count."""
        digest = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=16)
        if self._order is not None:
            digest.update(self._order.astype("<i8").tobytes())
        return digest.hexdigest()


def as_groups(together: Groups | ArrayLike) -> Groups:
    """Groups of keys, or the groups themselves."""
    return together if isinstance(together, Groups) else Groups(together)


def _checked_keys(keys: ArrayLike) -> NDArray[Any]:
    values = np.asarray(keys)
    if values.ndim != 1:
        raise ValueError(f"together must be one key a row, not of shape {values.shape}.")
    if values.size == 0:
        return values.astype(np.int64)
    if values.dtype == object and all(isinstance(key, str) for key in values):
        values = values.astype(str)
    if values.dtype.kind not in "iubUS":
        raise TypeError(
            f"the keys of together must be whole numbers or strings, not {values.dtype}: key 0 is "
            f"{values[0]!r}. Rows belong together where their keys are equal; number them, or name them."
        )
    return values


def _places(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... sizes[0] of them, then those of the next."""
    places = np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
    places += np.arange(len(places))
    return places


def _rises(keys: NDArray[Any]) -> bool:
    return keys.dtype.kind in "iu" and bool((keys[1:] > keys[:-1]).all())


__all__ = ["Groups", "as_groups"]
