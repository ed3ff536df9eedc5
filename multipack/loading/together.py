"""Which sequences of a data set belong together: by one of its columns, or by keys of the source's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from multipack.data.dataset import TokenDataset
from multipack.data.reading import read_scalars
from multipack.order.groups import Groups


def groups_of(dataset: TokenDataset, together: str | Groups | ArrayLike) -> Groups:
    """The groups of a data set's sequences.

    Args:
        dataset: the sequences.
        together: a column of numbers or strings, one a row; or one key for each row of the source.

    Raises:
        TypeError: the keys are neither whole numbers nor strings.
        ValueError: there is no such column, the keys are not one a row of the source, or a row of a group was
            left out of the data set while others of it are there.
    """
    if isinstance(together, Groups):
        return together
    if isinstance(together, str):
        _check_none_left_out(dataset, together)
        return Groups(_column(dataset, together))
    keys = np.asarray(together)
    if len(keys) != dataset.num_rows:
        raise ValueError(
            f"together has {len(keys)} keys for the {dataset.num_rows} rows of the source: some rows would "
            "belong to no group. Pass one key a row, in the order of the rows, with those that max_length "
            "or another option leaves out."
        )
    missing = np.setdiff1d(np.arange(dataset.num_rows), dataset.rows)
    broken = missing[np.isin(keys[missing], keys[dataset.rows])]
    if broken.size:
        raise ValueError(
            f"row {broken[0]} was left out of the data set, and others of its group {keys[broken[0]]!s} were "
            f"not: {broken.size} rows leave their group incomplete. Shorten them (overlong='truncate'), or "
            "leave whole groups out of the source."
        )
    return Groups(keys[dataset.rows])


def _check_none_left_out(dataset: TokenDataset, column: str) -> None:
    left_out = dataset.num_rows - len(np.unique(dataset.rows))
    if left_out:
        raise ValueError(
            f"together={column!r}, but {left_out} of {dataset.num_rows} rows were left out of the data set "
            "(empty, overlong or without a target), and others of their groups may still be there. Leave "
            "whole groups out of the source, shorten the rows (overlong='truncate'), or pass the keys of "
            "all rows as an array: then only broken groups are refused."
        )


def _column(dataset: TokenDataset, name: str) -> NDArray[Any]:
    """One key a sequence."""
    located = dataset.locate(np.arange(len(dataset)))
    columns = dataset.readers
    if name in columns.scalars:
        return read_scalars(columns.scalars[name], located).numpy()
    if name in columns.objects and _is_string(columns.objects[name].type):
        texts: NDArray[Any] = columns.objects[name].take(pa.array(located.rows)).to_numpy()
        return texts
    known = [*columns.scalars, *(key for key, values in columns.objects.items() if _is_string(values.type))]
    raise ValueError(
        f"together={name!r} is no column with a number or a string a row; there are "
        f"{', '.join(known) or 'none of these'}. Name one of them, or pass an array of one key a row."
    )


def _is_string(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))
