"""Megatron's token files: tokens in `<prefix>.bin`, and in `<prefix>.idx` where each sequence lies.

The index is read where it lies: 10^8 documents cost their lengths and nothing else.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from multipack import _core
from multipack.arguments import check_choice
from multipack.data.mapped import (
    Mapped,
    MappedRows,
    StrPath,
    as_paths,
    check_has_tokens_only,
    join,
    map_bytes,
)

MegatronRows = Literal["documents", "sequences"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float64",
    "float32",
    "uint16",
)  # of the codes 1, 2, ...
_LENGTH_BYTES, _POINTER_BYTES = 4, 8

_logger = logging.getLogger(__name__)


def megatron(prefixes: StrPath | Iterable[StrPath], *, rows: MegatronRows = "documents") -> MegatronFiles:
    """Token files of Megatron-LM, for TokenDataset.

    Args:
        prefixes: path without `.bin` and `.idx`, or several, which are read as one after the other.
        rows: what a row is: a "documents", or one of the "sequences" it may consist of (sentences, where the
            files were written with them).

    The format is that of `megatron/core/datasets/indexed_dataset.py`, version 1, of integers and floats.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an index has another magic, version or dtype, is truncated, or does not belong to its
            tokens.
    """
    check_choice("rows", rows, get_args(MegatronRows))
    files = MegatronFiles(tuple(_without_suffix(path) for path in as_paths(prefixes)), rows)
    for prefix in files.prefixes:
        _read_header(prefix)
    return files


@dataclass(frozen=True)
class MegatronFiles:
    """Token files of Megatron-LM by their prefixes."""

    prefixes: tuple[str, ...]
    rows: MegatronRows

    def open_rows(self, column: str, columns: Sequence[str] | None) -> Mapped:
        """Map the files. Reads lengths and pointers once, to check them, and no token."""
        check_has_tokens_only(column, columns)
        return join([_map(prefix, self.rows) for prefix in self.prefixes])


@dataclass(frozen=True)
class _Header:
    dtype: np.dtype[Any]
    num_sequences: int
    num_groups: int
    """Documents and one: entry d is the first sequence of document d."""


def _without_suffix(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx")


def _read_header(prefix: str) -> _Header:
    path = f"{prefix}.idx"
    with open(path, "rb") as file:
        raw = file.read(_HEADER.size)
    if raw[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"{path} begins with {raw[: len(_MAGIC)]!r}, not with Megatron's {_MAGIC!r}: it is no index of "
            "sequences. Files without an index are read by token_file()."
        )
    if len(raw) < _HEADER.size:
        raise ValueError(f"{path} ends inside its header, after {len(raw)} bytes: copy or write it again.")
    _, version, code, num_sequences, num_groups = _HEADER.unpack(raw)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version}; only version {_VERSION} is known. Write it again.")
    if not 1 <= code <= len(_DTYPES):
        raise ValueError(
            f"{path} has the dtype code {code}; only 1..{len(_DTYPES)} are known. Write it again."
        )
    return _Header(np.dtype(_DTYPES[code - 1]), num_sequences, num_groups)


def _map(prefix: str, rows: MegatronRows) -> MappedRows:
    header = _read_header(prefix)
    index, values = map_bytes(f"{prefix}.idx"), map_bytes(f"{prefix}.bin")
    lengths, pointers, groups = _parts(f"{prefix}.idx", index, header)
    _check_groups(f"{prefix}.idx", groups, header)
    _check_values(prefix, values.size, lengths, pointers, header)
    documents = groups if rows == "documents" else None
    element_bytes = header.dtype.itemsize
    file_index = _core.FileIndex(pointers, lengths, documents, element_bytes)
    chunk = _core.Chunk(file_index.num_rows, None, values, 0, values.size // element_bytes, file_index)
    return MappedRows(f"{prefix}.idx", header.dtype, chunk, file_index.num_rows)


def _parts(path: str, index: npt.NDArray[np.uint8], header: _Header) -> tuple[npt.NDArray[np.uint8], ...]:
    """Bytes of lengths, pointers and documents."""
    sizes = [_LENGTH_BYTES * header.num_sequences, _POINTER_BYTES * header.num_sequences]
    ends = np.cumsum([_HEADER.size, *sizes, _POINTER_BYTES * header.num_groups], dtype=object)
    if index.size < ends[-1]:
        raise ValueError(
            f"{path} has {index.size} bytes, but {header.num_sequences} sequences and {header.num_groups} "
            f"document entries take {ends[-1]}: it is truncated. Copy or write it again."
        )
    _check_modes(path, index[ends[-1] :], header)
    return tuple(index[start:stop] for start, stop in itertools.pairwise(ends))


def _check_modes(path: str, rest: npt.NDArray[np.uint8], header: _Header) -> None:
    """Behind the documents a multimodal index has one byte a sequence, which is 0 for text."""
    if rest.size == 0:
        return
    if rest.size != header.num_sequences:
        raise ValueError(
            f"{path} has {rest.size} bytes behind its {header.num_sequences} sequences, which no index has. "
            "Write it again."
        )
    if rest.any():
        raise ValueError(
            f"{path} has sequences of other modes than text, from sequence {int(np.flatnonzero(rest)[0])} "
            "on; their values are no tokens."
        )


def _check_groups(path: str, groups: npt.NDArray[np.uint8], header: _Header) -> None:
    edges = [int.from_bytes(part.tobytes(), "little") for part in (groups[:8], groups[-8:])]
    if header.num_groups < 1 or edges != [0, header.num_sequences]:
        raise ValueError(
            f"{path} has documents of the sequences {edges[0]}..{edges[1]}, but there are "
            f"{header.num_sequences} sequences: it is corrupt. Write it again."
        )


def _check_values(
    prefix: str,
    num_bytes: int,
    lengths: npt.NDArray[np.uint8],
    pointers: npt.NDArray[np.uint8],
    header: _Header,
) -> None:
    """The file of tokens ends where the index says that its last sequence ends."""
    last = _number(pointers[-_POINTER_BYTES:])
    wanted = last + _number(lengths[-_LENGTH_BYTES:]) * header.dtype.itemsize
    if num_bytes < wanted:
        raise ValueError(
            f"{prefix}.bin has {num_bytes} bytes, but its index needs {wanted} for {header.num_sequences} "
            f"sequences of {header.dtype}: it is truncated, or the index is of another file. Copy or write "
            "it again."
        )
    if num_bytes > wanted:
        _logger.warning(
            "%s.bin has %d bytes behind its last sequence, which are not read: the index may be of another "
            "file.",
            prefix,
            num_bytes - wanted,
        )


def _number(raw: npt.NDArray[np.uint8]) -> int:
    return int.from_bytes(raw.tobytes(), "little", signed=True)
