"""Files of nothing but tokens, one after the other, as pre-training pipelines write them.

The one rule: where a document ends is found once, when the source is made, and goes with it; the tokens stay
in their files, mapped by every process for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import csv

from multipack import _core
from multipack.arguments import whole_number
from multipack.data.mapped import (
    Mapped,
    MappedRows,
    StrPath,
    as_paths,
    check_has_tokens_only,
    join,
    map_bytes,
    token_dtype,
)
from multipack.data.megatron import MegatronFiles, MegatronRows, megatron

_BLOCK = 1 << 22
"""Tokens that a thread searches at once: enough that Python's share vanishes, few enough to stay in a
cache."""
_NPY_MAGIC = b"\x93NUMPY"
_LLMC_HEADER_BYTES = 1024
_LLMC_DTYPES: dict[int, np.dtype[Any]] = {20240520: np.dtype(np.uint16), 20240801: np.dtype(np.uint32)}

_logger = logging.getLogger(__name__)


def token_file(
    paths: StrPath | Iterable[StrPath],
    dtype: npt.DTypeLike,
    *,
    end: int | None = None,
    threads: int | None = None,
) -> TokenFiles:
    """Files of raw tokens, for TokenDataset.

    Args:
        paths: a file, or several, which are read as one after the other. A file holds tokens from its first
            byte on, or from behind the header of numpy's own `.npy` or of llm.c's `.bin`, which are
            recognised.
        dtype: what a token is stored as.
        end: the token that ends a document and belongs to it; what is behind the last one is a document too.
            None: a file is one document, for `overlong="split"` or `method="concat"`.
        threads: threads that search for `end`; None: one a core.

    The search reads every token once, 2 GB/s and thread or so, and keeps 8 bytes a document. Without `end`
    nothing is read.

    Raises:
        FileNotFoundError: a file is missing.
        TypeError: `dtype` is none that tokens have.
        ValueError: `end` is outside the range of `dtype`, or a file is truncated or of another dtype.
    """
    found = token_dtype(dtype)
    threads = whole_number("threads", threads or os.cpu_count() or 1, 1)
    if end is not None:
        _check_fits(end, found)
    files = [_flat_file(path, found) for path in as_paths(paths)]
    if end is None:
        return TokenFiles(tuple(_one_document(file) for file in files))
    with ThreadPoolExecutor(threads, "multipack-scan") as pool:
        return TokenFiles(tuple(_end_by_token(file, end, pool) for file in files))


def olmo(paths: StrPath | Iterable[StrPath], dtype: npt.DTypeLike) -> TokenFiles:
    """Files of raw tokens with metadata, as Dolma writes and OLMo reads them, for TokenDataset.

    Args:
        paths: a `.npy`, or several, which are read as one after the other. Beside each lies its `.csv.gz`: a
            line a document, first token and the one behind the last. Without it, use `token_file(end=)`.
        dtype: what a token is stored as.

    Raises:
        FileNotFoundError: a file or its metadata is missing.
        TypeError: `dtype` is none that tokens have.
        ValueError: a file is truncated, or its metadata overlap or leave it.
    """
    found = token_dtype(dtype)
    files = [_flat_file(path, found) for path in as_paths(paths)]
    return TokenFiles(tuple(_end_by_metadata(file) for file in files))


@dataclass(frozen=True, eq=False)
class _TokenFile:
    """One file, and where its documents end."""

    path: str
    dtype: np.dtype[Any]
    header_bytes: int
    num_tokens: int
    offsets: npt.NDArray[np.int64]
    """Row i holds the tokens offsets[i] .. offsets[i + 1]."""
    documents: npt.NDArray[np.int64] | None = None
    """Rows that are documents; None: all."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.header_bytes + self.num_tokens * self.dtype.itemsize

    def map(self) -> MappedRows:
        values = map_bytes(self.path, self.num_bytes)[self.header_bytes :]
        num_rows = len(self.offsets) - 1
        chunk = _core.Chunk(num_rows, self.offsets.view(np.uint8), values, 0, self.num_tokens)
        return MappedRows(self.path, self.dtype, chunk, num_rows, self.documents)


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """Files of raw tokens, by their paths and the ends of their documents."""

    files: tuple[_TokenFile, ...]

    def open_rows(self, column: str, columns: Sequence[str] | None) -> Mapped:
        """Map the files. Reads no token."""
        check_has_tokens_only(column, columns)
        return join([file.map() for file in self.files])


def _check_fits(end: int, dtype: np.dtype[Any]) -> None:
    whole_number("end", end)
    if dtype.kind == "f":
        raise ValueError(f"tokens of {dtype} have no end token: numbers that end documents are integers.")
    if not np.iinfo(dtype).min <= end <= np.iinfo(dtype).max:
        raise ValueError(
            f"end={end} is outside {np.iinfo(dtype).min}..{np.iinfo(dtype).max}, the range of {dtype}: no "
            "token of the file can be it. Check the tokenizer and the dtype."
        )


def _flat_file(path: str, dtype: np.dtype[Any]) -> _TokenFile:
    """A file whose documents are not known yet."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(12)
    if start.startswith(_NPY_MAGIC):
        header_bytes = _npy_header(path, size, dtype)
    elif int.from_bytes(start[:4], "little") in _LLMC_DTYPES and size >= _LLMC_HEADER_BYTES:
        header_bytes = _llmc_header(path, start, size, dtype)
    else:
        header_bytes = 0
    if (size - header_bytes) % dtype.itemsize:
        raise ValueError(
            f"{path} has {size - header_bytes} bytes of tokens, which is no multiple of the {dtype.itemsize} "
            f"of {dtype}: it is truncated, or of another dtype."
        )
    return _TokenFile(
        path, dtype, header_bytes, (size - header_bytes) // dtype.itemsize, np.zeros(1, np.int64)
    )


def _npy_header(path: str, size: int, dtype: np.dtype[Any]) -> int:
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, stored = read(file)
            header_bytes = file.tell()
    except ValueError as error:
        raise ValueError(f"{path} has a corrupt header of .npy: {error}. Copy or write it again.") from error
    if stored != dtype or len(shape) != 1:
        raise ValueError(
            f"{path} holds {stored} of shape {shape} by its .npy header, not a flat array of {dtype}."
        )
    _check_size(path, size, header_bytes + shape[0] * dtype.itemsize, ".npy")
    return header_bytes


def _llmc_header(path: str, start: bytes, size: int, dtype: np.dtype[Any]) -> int:
    """256 int32: magic, version, number of tokens. Anything else that begins with the magic is not that
    format."""
    magic, num_tokens = int.from_bytes(start[:4], "little"), int.from_bytes(start[8:12], "little")
    stored = _LLMC_DTYPES[magic]
    _check_size(path, size, _LLMC_HEADER_BYTES + num_tokens * stored.itemsize, "llm.c")
    if stored != dtype:
        raise ValueError(f"{path} holds {stored} by its llm.c header, not {dtype}.")
    return _LLMC_HEADER_BYTES


def _check_size(path: str, size: int, wanted: int, kind: str) -> None:
    if size != wanted:
        raise ValueError(
            f"{path} has {size} bytes, but {wanted} by its {kind} header: it is truncated, or still being "
            "written. Copy or write it again."
        )


def _with_offsets(
    file: _TokenFile, offsets: npt.NDArray[np.int64], documents: npt.NDArray[np.int64] | None = None
) -> _TokenFile:
    return _TokenFile(file.path, file.dtype, file.header_bytes, file.num_tokens, offsets, documents)


def _one_document(file: _TokenFile) -> _TokenFile:
    return _with_offsets(file, np.array([0, file.num_tokens], np.int64))


def _end_by_token(file: _TokenFile, end: int, pool: ThreadPoolExecutor) -> _TokenFile:
    values = map_bytes(file.path, file.num_bytes)[file.header_bytes :].view(file.dtype)
    wanted = file.dtype.type(end)

    def ends_in(start: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(values[start : start + _BLOCK] == wanted) + (start + 1)

    ends = list(pool.map(ends_in, range(0, len(values), _BLOCK)))
    last = next((int(block[-1]) for block in reversed(ends) if len(block)), 0)
    if last == 0 and len(values):
        _logger.warning(
            "%s has no token %d among %d: the whole file is one document. Check `end`.",
            file.path,
            end,
            len(values),
        )
    rest = [np.array([len(values)])] if last < len(values) else []
    return _with_offsets(file, np.concatenate([np.zeros(1, np.int64), *ends, *rest]))


def _end_by_metadata(file: _TokenFile) -> _TokenFile:
    path = file.path.removesuffix(".npy") + ".csv.gz"
    starts, ends = _read_metadata(path)
    before = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
    wrong = np.flatnonzero((starts < before) | (ends < starts) | (ends > file.num_tokens))
    if len(wrong):
        line = int(wrong[0])
        raise ValueError(
            f"{path}, line {line + 1}: a document of the tokens {starts[line]}..{ends[line]} overlaps the "
            f"one before or leaves the {file.num_tokens} tokens of {file.path}: the metadata is of another "
            f"file, or the dtype is not {file.dtype}."
        )
    lost = file.num_tokens - int((ends - starts).sum())
    if lost == 0:
        return _with_offsets(file, np.concatenate([np.zeros(1, np.int64), ends]))
    _logger.warning("%s: %d tokens of %s are in no document and are left out.", path, lost, file.path)
    # Rows are documents and what lies between two of them, by turns.
    offsets = np.stack([starts, ends], axis=1).reshape(-1) if len(starts) else np.zeros(1, np.int64)
    return _with_offsets(file, offsets, np.arange(0, len(offsets) - 1, 2))


def _read_metadata(path: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First token of each document and the one behind its last. The further fields of a line are not read."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} is missing, which says where documents end. Without it use token_file(path, dtype, "
            "end=...)."
        )
    names = ["f0", "f1"]
    try:
        with pa.input_stream(path, compression="gzip") as stream:
            table = csv.read_csv(
                stream,
                read_options=csv.ReadOptions(autogenerate_column_names=True),
                convert_options=csv.ConvertOptions(
                    include_columns=names, column_types=dict.fromkeys(names, pa.int64()), null_values=[]
                ),
            )
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        if "Empty CSV" in str(error):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        raise ValueError(
            f"{path} cannot be read as lines of first and last token: {error}. Write it again."
        ) from error
    starts, ends = (table.column(name).to_numpy() for name in names)
    return starts, ends


__all__ = ["MegatronFiles", "MegatronRows", "TokenFiles", "megatron", "olmo", "token_file"]
