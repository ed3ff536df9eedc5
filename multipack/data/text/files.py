"""The rows of a file, whatever kind of file it is.

One rule: a row is what the file says. No type is guessed (a text that looks like a date stays a text), no key
is lost, and whatever cannot be read is one ValueError that names the file, with the line or row where there
is one.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from multipack.data.text.arrow_rows import arrow_rows, parquet_rows, saved_rows
from multipack.data.text.delimited import delimited_rows, text_rows
from multipack.data.text.json_rows import json_rows

Row = dict[str, Any]

logger = logging.getLogger(__name__)

_KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_COMPRESSED = (".gz", ".zst")
_WHOLE = ("parquet", "arrow")  # kinds that are never read through a decompressor
SUFFIXES = tuple(_KINDS)
"""Of files that hold rows, in lower case; those of text may be followed by .gz or .zst."""
UNREADABLE = (
    *(OSError, EOFError, zlib.error, UnicodeError, json.JSONDecodeError, pa.ArrowException),
    *(RecursionError, KeyError),
)
"""What libraries raise about files that are cut short, damaged or of another kind; they do not say which
file."""
_ABOUT = (".md", ".yaml", ".yml", ".lock", "")
"""Suffixes of files that are about others."""
_MOST_SHOWN = 5
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}


class Block(NamedTuple):
    """Rows that stand one after the other in a file."""

    path: Path
    first_row: int
    """Number of the first of them in its file, counted from 0."""
    rows: list[Row]


def kind_of(path: Path) -> str | None:
    """`json`, `csv`, `tsv`, `text`, `parquet` or `arrow` by the suffix, in capitals or not; None: another
    kind of file."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in _COMPRESSED:
        kind = _KINDS.get(suffixes[-2]) if len(suffixes) == 2 else None
        return None if kind in _WHOLE else kind
    return _KINDS.get(suffixes[-1]) if suffixes else None


def data_files(path: Path, split: str | None) -> list[Path]:
    """The files that a path means, in the order of their names, or the folder of one data set that
    `save_to_disk` wrote.

    Args:
        path: a file, a folder of files, or a folder that `save_to_disk` wrote.
        split: name of a split, of a saved DatasetDict or of a folder whose file names say it (test.jsonl,
            data/dev-0.csv); files without such a name belong to train. None: train, or the only split there
            is.

    Raises:
        ValueError: nothing there, a kind of file that is not read, or no such split; the message names what
            is there.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if (path / "dataset_dict.json").exists():
        return [path / _choose(path, _saved_splits(path / "dataset_dict.json"), split)]
    if path.is_file() or (path / "state.json").exists():
        if split not in (None, "train"):
            what = "a file" if path.is_file() else "saved without splits"
            raise ValueError(
                f"{path} is {what}, so it has no splits: {split!r} cannot be chosen. Leave the split out."
            )
        _check_kind(path)
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file) is not None)
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(
            f"{path} holds no data set that save_to_disk wrote, and no file that ends with "
            f"{', '.join(SUFFIXES)}."
        )
    # A .json file beside other data describes them, as in the trainer's cache.
    files = [file for file in files if file.suffix.lower() != ".json"] or files
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_named(file.relative_to(path)), []).append(file)
    return by_split[_choose(path, list(by_split), split)]


def say_unread_files(path: Path, split: str | None) -> None:
    """Log once which files of a folder hold no rows that are read here, or rows of other splits."""
    if not path.is_dir() or (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return
    read = {*data_files(path, split)}
    left = [
        str(file.relative_to(path))
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file not in read
        and file.suffix.lower() not in _ABOUT
        and not file.name.startswith(".")
    ]
    if left:
        shown = ", ".join(left[:_MOST_SHOWN]) + (
            f" and {len(left) - _MOST_SHOWN} more" if left[_MOST_SHOWN:] else ""
        )
        logger.warning("%s: files not read: %s", path, shown)


def read_blocks(path: Path, *, size: int = 256) -> Iterator[Block]:
    """The rows of one file, or of one folder that `save_to_disk` wrote, `size` at a time.

    Raises:
        ValueError: the file is damaged, ends early, or holds something other than rows; the message names it.
        OSError: the disk fails.
    """
    with naming(path):
        first_row = 0
        rows = _rows(path, size)
        while block := list(islice(rows, size)):
            yield Block(path, first_row, block)
            first_row += len(block)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What libraries raise about a file's content becomes a ValueError that names the file."""
    try:
        yield
    except UNREADABLE as error:
        if (
            isinstance(error, OSError)
            and error.errno is not None
            and not isinstance(error, pa.ArrowException)
        ):
            raise  # of the disk, not of the data
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} cannot be read; is it whole, and what its name says? {reason}") from error


def _rows(path: Path, size: int) -> Iterator[Row]:
    if path.is_dir():
        yield from saved_rows(path, size)
        return
    kind = _check_kind(path)
    if kind == "parquet":
        yield from parquet_rows(path, size)
    elif kind == "arrow":
        yield from arrow_rows(path, size)
    elif path.stat().st_size:  # an empty file is no rows, also where its suffix promises a compressed stream
        with path.open("rb") as raw, _decompressed(path, raw) as stream:
            if kind == "json":
                yield from json_rows(path, stream)
            elif kind == "text":
                yield from text_rows(path, stream)
            else:
                yield from delimited_rows(path, stream, "\t" if kind == "tsv" else ",")


def _check_kind(path: Path) -> str:
    kind = "saved" if path.is_dir() else kind_of(path)
    if kind is None:
        suffix = "".join(path.suffixes[-2:]) or path.name
        raise ValueError(
            f"{path} has the suffix {suffix!r}, which is not a kind of file that is read here. Use "
            f"{', '.join(SUFFIXES)} (those of text also with {' or '.join(_COMPRESSED)})."
        )
    return kind


@contextmanager
def _decompressed(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream  # type: ignore[misc]  # a GzipFile reads as a binary file does
    elif suffix == ".zst":
        with pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd") as stream:
            yield io.BufferedReader(_Readable(stream))
    else:
        yield raw


class _Readable(io.RawIOBase):
    """An Arrow stream as Python's files are."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _saved_splits(listing: Path) -> list[str]:
    try:
        splits: list[str] = json.loads(listing.read_text(encoding="utf-8"))["splits"]
    except UNREADABLE as error:
        raise ValueError(f"{listing} does not list the splits of a DatasetDict: {error}.") from error
    return splits


def _choose(path: Path, splits: Sequence[str], split: str | None) -> str:
    name = split or ("train" if "train" in splits or len(splits) > 1 else splits[0])
    if name not in splits:
        raise ValueError(f"{path} has the splits {', '.join(splits)}, and no {name!r}: choose one of them.")
    return name


def _split_named(file: Path) -> str:
    """The split that a file's name says, else its folders' names; train where none does."""
    for part in (file.name.partition(".")[0], *reversed(file.parent.parts)):
        words = set(re.split(r"[^a-z0-9]+", part.lower()))
        for split, names in _SPLITS.items():
            if words & set(names):
                return split
    return "train"
