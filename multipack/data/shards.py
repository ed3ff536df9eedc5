"""Rows of MDS shards and of WebDataset tars, read by the libraries that write them.

Both formats must be read to know a length, so their rows are copied into Arrow memory once, or streamed:
`TokenDataset.from_iterable(mds_rows(...))`, `StreamPacker(webdataset_rows(...))`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from multipack.data.mapped import StrPath, token_dtype

Row = dict[str, Any]


class mds_rows(Iterable[Row]):
    """Rows of a local directory of MDS shards, as MosaicML streaming wrote them.

    Args:
        directory: where `index.json` lies.
        dtypes: columns that were written as raw bytes, and the dtype of their numbers, such as {"tokens":
            np.uint16}.

    Raises:
        ImportError: the package `mosaicml-streaming` is missing.
        TypeError: a column of `dtypes` is missing or holds no bytes.
        ValueError: bytes that are no multiple of the dtype's.
    """

    def __init__(self, directory: StrPath, dtypes: Mapping[str, npt.DTypeLike] | None = None) -> None:
        streaming = _library("streaming", "mosaicml-streaming")
        self._rows = streaming.LocalDataset(str(directory))
        self._dtypes = {name: token_dtype(dtype) for name, dtype in (dtypes or {}).items()}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        for i in range(len(self._rows)):
            row = self._rows[i]
            yield {**row, **_numbers(row, self._dtypes, f"row {i}")}


class webdataset_rows(Iterable[Row]):
    """Rows of WebDataset tars.

    Args:
        urls: what `webdataset.WebDataset` takes: a path, several, or a pattern such as
            "shard-{000..009}.tar".
        columns: name of a column and the extension its file has in a tar, such as {"input_ids": "npy"}. Files
            with other extensions are not read.
        dtypes: columns whose files are raw bytes of numbers, and their dtype; other files are decoded by
            their extension.

    Tars are read in the given order, without shuffling; a broken tar is an error.

    Raises:
        ImportError: the package `webdataset` is missing.
        TypeError, ValueError: a sample has no file for a column, or raw bytes do not fit their dtype.
    """

    def __init__(
        self,
        urls: Any,
        columns: Mapping[str, str],
        dtypes: Mapping[str, npt.DTypeLike] | None = None,
    ) -> None:
        self._library = _library("webdataset", "webdataset")
        self._urls = urls
        self._columns = dict(columns)
        self._dtypes = {name: token_dtype(dtype) for name, dtype in (dtypes or {}).items()}
        unknown = self._dtypes.keys() - self._columns.keys()
        if unknown:
            raise ValueError(
                f"dtypes names {sorted(unknown)}, which are none of the columns {sorted(self._columns)}"
            )

    def __iter__(self) -> Iterator[Row]:
        raw = [self._columns[name] for name in self._dtypes]
        samples = self._library.WebDataset(self._urls, shardshuffle=False, handler=_raise)
        for sample in samples.decode(only=[end for end in self._columns.values() if end not in raw] or [""]):
            where = f"sample {sample['__key__']!r} of {sample['__url__']}"
            missing = [end for end in self._columns.values() if end not in sample]
            if missing:
                raise ValueError(f"{where} has no file .{missing[0]}; it has {sorted(_extensions(sample))}")
            row = {name: sample[end] for name, end in self._columns.items()}
            yield {**row, **_numbers(row, self._dtypes, where)}


def _extensions(sample: Mapping[str, Any]) -> list[str]:
    return [f".{name}" for name in sample if not name.startswith("__")]


def _raise(error: Exception) -> bool:
    raise error


def _numbers(row: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any]], where: str) -> Row:
    """The raw bytes of some columns as numbers."""
    return {
        name: _from_bytes(row.get(name), dtype, f"column {name!r} of {where}")
        for name, dtype in dtypes.items()
    }


def _from_bytes(value: Any, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    if not isinstance(value, bytes):
        raise TypeError(f"{where} is a {type(value).__name__}, not bytes: leave it out of `dtypes`.")
    if len(value) % dtype.itemsize:
        raise ValueError(
            f"{where} has {len(value)} bytes, which is no multiple of the {dtype.itemsize} of {dtype}."
        )
    return np.frombuffer(value, dtype)


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"reading these shards needs the package {package}: pip install {package}"
        ) from error
