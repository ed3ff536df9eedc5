"""Whatever holds token sequences, as an Arrow table.

Arrow data are taken as they are; arrays become Arrow without a copy; Python lists are converted once.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from multipack.data.columns import Columns

_Item = TypeVar("_Item")

_ROWS_PER_CHUNK = 8192
_MAX_INT32 = 2**31 - 1


class Rows(Protocol):
    """Rows that are no Arrow table in memory: of files that are mapped, or of a store."""

    lengths: npt.NDArray[Any]
    """Tokens of each row; uint16, uint32 or int64."""
    documents: npt.NDArray[np.int64] | None
    """Rows that belong to the data set; None: all."""

    @property
    def names(self) -> tuple[str, ...]:
        """Columns as batches have them, "input_ids" first."""

    @property
    def shuffle_block(self) -> int:
        """Neighbours that lie together: what to permute as a whole."""

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[Columns, npt.NDArray[np.int64]]:
        """Columns that hold these rows, and the number of each row in them."""

    def read_ahead(
        self, items: Iterator[_Item], rows_of: Callable[[_Item], npt.NDArray[np.int64]]
    ) -> Iterator[_Item]:
        """The same items, of which some are taken early to see which rows come."""


@runtime_checkable
class Files(Protocol):
    """What opens to rows; pickles as paths or URLs."""

    def open_rows(self, column: str, columns: Sequence[str] | None) -> Rows:
        """The rows, with the columns named."""


@dataclass(frozen=True)
class Source:
    """An Arrow table and, for a selected or shuffled `datasets.Dataset`, the table row of each row."""

    table: pa.Table
    index_map: npt.NDArray[np.int64] | None
    origin: Any
    """What opens to the same table again: a `datasets.Dataset`, a pair of arrays, the table, or the files of
    `rows`."""
    rows: Rows | None = None
    """Rows that are no Arrow table; the table is then empty."""

    @property
    def num_rows(self) -> int:
        if self.index_map is not None:
            return len(self.index_map)
        return int(self.table.num_rows) if self.rows is None else len(self.rows.lengths)


def open_source(source: Any, column: str, columns: Sequence[str] | None) -> Source:
    """The table of `source` with the columns named, `column` first.

    Raises:
        TypeError: `source` is nothing that is read in place; the message names the remedy.
        ValueError: a column is missing, or rows have different keys.
    """
    if isinstance(source, Files):
        rows = source.open_rows(column, columns)
        return Source(pa.table({}), rows.documents, source, rows)
    if _is_dataset(source):
        return _open_dataset(source, column, columns)
    if isinstance(source, tuple) and len(source) == 2:
        return Source(pa.table({column: _array_of_pair(*source)}), None, source)
    table = _select(_to_table(source, column), column, columns)
    return Source(table, None, table)


def _to_table(source: Any, column: str) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, pa.RecordBatch):
        return pa.Table.from_batches([source])
    if isinstance(source, Mapping) and not any(_is_dataset(split) for split in source.values()):
        return _table_of_columns(source)
    if isinstance(source, list):
        return table_of_rows(source, column, first_row=0)
    raise TypeError(
        f"{type(source).__name__} cannot be read in place. Of a DatasetDict take one split; for any other "
        "data set or iterable of rows use TokenDataset.from_iterable(rows), which copies it into memory "
        "once."
    )


def to_pickle(origin: Any) -> Any:
    """The origin of a source such that memory-mapped data go as a path, and of a sliced table only its
    rows."""
    if isinstance(origin, pa.Table):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, origin.schema) as writer:
            writer.write_table(origin)
        return sink.getvalue()
    if isinstance(origin, tuple):
        return tuple(_MappedArray.of(array) or array for array in origin)
    return origin


def from_pickle(pickled: Any) -> Any:
    if isinstance(pickled, pa.Buffer):
        return pa.ipc.open_stream(pickled).read_all()
    if isinstance(pickled, tuple):
        return tuple(array.open() if isinstance(array, _MappedArray) else array for array in pickled)
    return pickled


@dataclass(frozen=True)
class _MappedArray:
    """A flat `numpy.memmap` by its place in a file."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    size: int

    @classmethod
    def of(cls, array: Any) -> _MappedArray | None:
        # A view of a mapping does not know where in the file it begins; its base is the mapping's array.
        base: Any = getattr(array, "base", None)
        if not isinstance(array, np.memmap) or not isinstance(base, mmap.mmap) or array.filename is None:
            return None
        return cls(str(array.filename), array.dtype, array.offset, array.size)

    def open(self) -> npt.NDArray[Any]:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.size,))


def _is_dataset(source: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(source, datasets.Dataset)


def _open_dataset(dataset: Any, column: str, columns: Sequence[str] | None) -> Source:
    shown = dataset.format
    if shown["type"] == "custom":
        raise TypeError(
            "this datasets.Dataset computes its rows by a transform (with_transform), which its table does "
            "not hold. Compute them once with .map(), or use TokenDataset.from_iterable(dataset)."
        )
    if columns is None:
        columns = shown["columns"]
    table = _select(dataset.data.table, column, columns)
    index_map = None if dataset._indices is None else _index_map(dataset._indices.column(0))
    return Source(table, index_map, dataset)


def _index_map(indices: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    parts = [chunk.to_numpy() for chunk in indices.chunks]
    flat = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.uint64)])
    return flat.view(np.int64)


def _select(table: pa.Table, column: str, columns: Sequence[str] | None) -> pa.Table:
    names = table.column_names
    wanted = [column, *(name for name in (names if columns is None else columns) if name != column)]
    for name in wanted:
        if names.count(name) != 1:
            raise ValueError(f"the source has {names.count(name)} columns named {name!r}; it has {names}")
    return table.select(wanted)


def rows_to_table(rows: Iterable[Any], column: str) -> pa.Table:
    """A table of rows that come one by one. Rows are mappings, or sequences of tokens."""
    iterator = _iterate(rows)
    tables: list[pa.Table] = []
    num_rows = 0
    while block := list(islice(iterator, _ROWS_PER_CHUNK)):
        tables.append(table_of_rows(block, column, first_row=num_rows))
        num_rows += len(block)
    if not tables:
        raise ValueError(
            "the iterable has no rows: nothing could be trained; it may have been consumed before"
        )
    return pa.concat_tables(tables, promote_options="permissive")


def _iterate(rows: Any) -> Iterator[Any]:
    # A map-style data set of torch's need not raise IndexError at its end, which plain iteration would wait
    # for.
    if not hasattr(rows, "__iter__") and hasattr(rows, "__len__"):
        return (rows[i] for i in range(len(rows)))
    return iter(rows)


def table_of_rows(rows: Sequence[Any], column: str, *, first_row: int) -> pa.Table:
    mappings = [row if isinstance(row, Mapping) else {column: row} for row in rows]
    names = list(mappings[0]) if mappings else [column]
    for i, row in enumerate(mappings):
        if row.keys() != mappings[0].keys():
            raise ValueError(
                f"row {first_row + i} has the keys {sorted(row)}, but row {first_row} has {sorted(names)}"
            )
    return _table_of_columns({name: [row[name] for row in mappings] for name in names})


def _table_of_columns(columns: Mapping[str, Any]) -> pa.Table:
    arrays = {name: _array(name, values) for name, values in columns.items()}
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError(
            f"columns differ in their number of rows: { {k: len(v) for k, v in arrays.items()} }"
        )
    return pa.table(arrays)


def _array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, np.ndarray | torch.Tensor):
        array = _numpy(values)
        if array.ndim == 2 and array.dtype != object and array.size:
            return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
        if array.ndim == 1 and array.dtype != object:
            return pa.array(array)
        values = array
    rows = list(values)
    try:
        if any(isinstance(row, np.ndarray | np.generic | torch.Tensor) for row in rows):
            return _array_of_arrays([_numpy(row) for row in rows])
        return pa.array(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"column {name!r} cannot become Arrow: {error}") from error


def _numpy(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array: npt.NDArray[Any] = np.asarray(value)
    # Arrow has this machine's byte order only.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array_of_arrays(rows: list[npt.NDArray[Any]]) -> pa.Array:
    """Rows of one number, of shape (L,) or of shape (1, L). Anything deeper stays nested."""
    if all(row.ndim == 0 for row in rows):
        return pa.array([row.item() for row in rows])
    if not all(row.ndim == 1 or (row.ndim == 2 and row.shape[0] == 1) for row in rows):
        return pa.array([row.tolist() for row in rows])
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([row.size for row in rows], out=offsets[1:])
    values = np.concatenate([row.reshape(-1) for row in _of_one_dtype(rows)])
    return _array_of_pair(values, offsets if offsets[-1] > _MAX_INT32 else offsets.astype(np.int32))


def _of_one_dtype(rows: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Rows of mixed integer types become int64, whose range numpy would leave for float64 (uint64 with
    int64)."""
    dtypes = {row.dtype for row in rows if row.size}
    if len(dtypes) <= 1:
        dtype = dtypes.pop() if dtypes else rows[0].dtype
    elif all(dtype.kind in "bui" for dtype in dtypes):
        dtype = np.dtype(np.int64)
        if any(row.dtype == np.uint64 and row.size and row.max() > np.iinfo(np.int64).max for row in rows):
            raise pa.ArrowInvalid("a value above 2^63 - 1 does not fit int64")
    else:
        dtype = np.result_type(*dtypes)
    return [row.astype(dtype, copy=False) for row in rows]


def _array_of_pair(values: Any, offsets: Any) -> pa.Array:
    """Row i is values[offsets[i]:offsets[i + 1]]. The offsets are checked where rows are read."""
    values, offsets = _numpy(values), _numpy(offsets)
    if values.ndim != 1 or offsets.ndim != 1 or offsets.size == 0 or offsets.dtype.kind not in "ui":
        raise ValueError(
            f"(values, offsets) have shapes {values.shape} and {offsets.shape} and dtypes {values.dtype} and "
            f"{offsets.dtype}: both must be flat, and the offsets integers, one more than there are rows"
        )
    if offsets.dtype != np.int32:
        offsets = offsets.astype(np.int64, copy=False)
    kind = pa.ListArray if offsets.dtype == np.int32 else pa.LargeListArray
    try:
        return kind.from_arrays(pa.array(offsets), pa.array(values))
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"the offsets are corrupt: {error}. Row i must be values[offsets[i]:offsets[i + 1]]"
        ) from error
