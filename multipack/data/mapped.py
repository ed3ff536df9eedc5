"""Tokens in files, mapped and read in place.

The one rule: opening reads what says where documents lie, and no token. A source is its paths, so it pickles
as paths and every process maps the files for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from multipack import _core
from multipack.data.columns import Columns, number_column

OFFSET_BYTES = 8
"""Size of the offsets of a chunk without an index of its own."""
_ROWS_AT_ONCE = 1 << 20
_ELEMENTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")

_Item = TypeVar("_Item")
StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class MappedRows:
    """The documents of one file: one chunk of a column."""

    path: str
    """The file of tokens, for messages."""
    dtype: np.dtype[Any]
    chunk: _core.Chunk
    num_rows: int
    documents: npt.NDArray[np.int64] | None = None
    """Rows that are documents, ascending; None: all. The others are tokens between documents."""


@dataclass(frozen=True)
class Mapped:
    """The documents of all files of a source."""

    columns: Columns
    lengths: npt.NDArray[Any]
    """Tokens of each row, whether it is a document or not; uint16, uint32 or int64."""
    documents: npt.NDArray[np.int64] | None
    """Rows that are documents; None: all."""

    @property
    def names(self) -> tuple[str, ...]:
        """Columns as batches have them."""
        return tuple(self.columns.tokens)

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[Columns, npt.NDArray[np.int64]]:
        """Columns that hold these rows, and the number of each row in them."""
        return self.columns, rows

    @property
    def shuffle_block(self) -> int:
        """Rows anywhere are read alike."""
        return 1

    def read_ahead(
        self, items: Iterator[_Item], rows_of: Callable[[_Item], npt.NDArray[np.int64]]
    ) -> Iterator[_Item]:
        """The same items: the operating system reads mapped files."""
        return items


def check_has_tokens_only(column: str, columns: Sequence[str] | None) -> None:
    """Refuse other columns than tokens, which such files do not hold."""
    others = {column, *(columns or ())} - {"input_ids"}
    if others:
        raise ValueError(
            f"a file of tokens has no column {sorted(others)}: it holds nothing but tokens. Leave `column` "
            "and `columns` out."
        )


def join(files: Sequence[MappedRows]) -> Mapped:
    """The documents of several files, one file after the other.

    Raises:
        ValueError: the files differ in dtype, or the index of one contradicts itself; the message names the
            file.
    """
    for file in files[1:]:
        if file.dtype != files[0].dtype:
            raise ValueError(
                f"{file.path} holds {file.dtype}, but {files[0].path} holds {files[0].dtype}: one column has "
                "one dtype. Open them as two data sets."
            )
    element = files[0].dtype.name
    lengths = [_lengths(file, element) for file in files]
    joined: npt.NDArray[Any] = np.concatenate(lengths) if len(lengths) > 1 else lengths[0]
    column = number_column(element, OFFSET_BYTES, 0, [file.chunk for file in files])
    return Mapped(Columns(tokens={"input_ids": column}), joined, _documents(files))


def _documents(files: Sequence[MappedRows]) -> npt.NDArray[np.int64] | None:
    if all(file.documents is None for file in files):
        return None
    first_rows = np.cumsum([0, *(file.num_rows for file in files)])
    parts = [
        first + (np.arange(file.num_rows) if file.documents is None else file.documents)
        for first, file in zip(first_rows[:-1], files, strict=True)
    ]
    return np.concatenate(parts)


def _lengths(file: MappedRows, element: str) -> npt.NDArray[Any]:
    """Length of every row of a file. Whatever is wrong with its index is found here."""
    reader = _core.Column(element, OFFSET_BYTES, 0, [file.chunk])
    lengths: npt.NDArray[Any] = np.empty(file.num_rows, np.uint16)
    block = np.empty(min(_ROWS_AT_ONCE, file.num_rows), np.int64)
    rows = np.arange(len(block))
    for first in range(0, file.num_rows, _ROWS_AT_ONCE):
        size = min(_ROWS_AT_ONCE, file.num_rows - first)
        try:
            reader.lengths(rows[:size], block[:size])
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from error
        lengths = _wide_enough(lengths, int(block[:size].max()))
        lengths[first : first + size] = block[:size]
        rows += _ROWS_AT_ONCE
    return lengths


def _wide_enough(lengths: npt.NDArray[Any], longest: int) -> npt.NDArray[Any]:
    if longest <= np.iinfo(lengths.dtype).max:
        return lengths
    return lengths.astype(np.uint32 if longest <= np.iinfo(np.uint32).max else np.int64)


def map_bytes(path: str, wanted: int | None = None) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped. uint8, shape [size].

    Raises:
        FileNotFoundError: as `open`.
        ValueError: the file has another size than `wanted`.
    """
    size = os.path.getsize(path)
    if wanted is not None and size != wanted:
        raise ValueError(
            f"{path} has {size} bytes, but had {wanted} when it was opened first: it was changed, so that "
            "its documents would be read at wrong places. Open the data set again."
        )
    if size == 0:  # an empty file cannot be mapped
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def token_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """`dtype`, which a file of tokens may have.

    Raises:
        TypeError: it is no number of this machine's byte order.
    """
    found = np.dtype(dtype)
    if found.name not in _ELEMENTS or not found.isnative:
        raise TypeError(
            f"dtype {dtype!r} is none a file of tokens is read as; it must be one of {', '.join(_ELEMENTS)}, "
            "in the byte order of this machine"
        )
    return found


def as_paths(paths: StrPath | Iterable[StrPath]) -> tuple[str, ...]:
    """One path, or several, as absolute ones: a worker may have another working directory.

    Raises:
        ValueError: there is none.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise ValueError("no file is named: give at least one path")
    return tuple(str(Path(path).absolute()) for path in given)
