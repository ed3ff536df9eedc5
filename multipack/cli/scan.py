"""Read the lengths of all rows of whatever holds them: data files, a saved data set, an array.

One rule: of token columns only the offsets are read, never the tokens; text is tokenised in blocks and forgotten.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

COLUMNS = ("input_ids", "tokens", "messages", "conversations", "text", "length", "lengths", "num_tokens")
"""Columns that are looked for, in this order, where none is named."""

_LINES_AT_ONCE = 4096
_MOST_TOKENS = 1 << 40
"""Of a row: sums over 2^22 such rows still fit 64 bits, and a larger number is not a count of tokens."""
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".json", ".npy")
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError, pa.ArrowException)
"""What libraries raise about files that are cut short, damaged or of another kind; they do not say which file."""


class Progress(Protocol):
    """Told of `done` out of `total` units of the file that is read."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


Tokenise = Callable[[list[Any]], list[int]]
"""Token counts of texts, or of conversations."""


@dataclass(frozen=True)
class Scanned:
    """What was found."""

    lengths: NDArray[np.int64]
    """Tokens of every row, empty ones included, shape [num_rows]."""
    column: str
    """Where the lengths came from."""
    files: int
    made_up: bool
    """Only lengths were there, or text: no token lists that a loader could read."""


def scan(
    paths: Sequence[Path],
    *,
    column: str | None,
    split: str | None,
    tokenise: Tokenise | None,
    progress: Progress,
) -> Scanned:
    """Lengths of all rows of files and folders.

    Args:
        column: token lists, lengths, or, with `tokenise`, texts or conversations; None to look for a usual name.
        split: of a saved DatasetDict.

    Raises:
        ValueError: nothing to read, an unknown kind of file, a column that is missing or holds something else, a null.
    """
    reader = _Reader(column, tokenise, progress)
    files = 0
    for file in data_files(paths, split):
        reader.read(file)
        files += 1
    if not any(len(part) for part in reader.parts):
        raise ValueError(f"{', '.join(map(str, paths))} holds no rows.")
    return Scanned(np.concatenate(reader.parts), reader.column or "lengths", files, reader.made_up)


def data_files(paths: Sequence[Path], split: str | None) -> list[Path]:
    """The files, and folders of saved data sets, that the arguments mean.

    Raises:
        ValueError: there are none, or a DatasetDict has no such split.
    """
    return [file for path in paths for file in _files(path, split)]


def _files(path: Path, split: str | None) -> list[Path]:
    """The files that one argument means."""
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if (path / "dataset_dict.json").exists():
        splits = _splits(path / "dataset_dict.json")
        name = split or ("train" if "train" in splits or len(splits) > 1 else splits[0])
        if name not in splits:
            raise ValueError(f"{path} has the splits {', '.join(splits)}: name one by --split.")
        return [path / name]
    if split is not None:
        raise ValueError(f"--split {split}: {path} is not a saved DatasetDict, so it has no splits.")
    if path.is_file() or (path / "state.json").exists():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(_SUFFIXES))
    if not found:
        raise ValueError(
            f"{path} holds no data set that save_to_disk wrote, and no file that ends with {', '.join(_SUFFIXES)}."
        )
    # A .json file beside other data describes them, as in the trainer's cache.
    return [file for file in found if file.suffix != ".json"] or found


def _splits(listing: Path) -> list[str]:
    try:
        splits: list[str] = json.loads(listing.read_text())["splits"]
    except (*_UNREADABLE, KeyError) as error:
        raise ValueError(f"{listing} does not list the splits of a DatasetDict: {error}.") from error
    return splits


class _Reader:
    """Collects lengths; the first file settles the column."""

    def __init__(self, column: str | None, tokenise: Tokenise | None, progress: Progress) -> None:
        self.column = column
        self.parts: list[NDArray[np.int64]] = []
        self.made_up = False
        self._tokenise = tokenise
        self._progress = progress
        self._path = Path()
        self._num_rows = 0

    def read(self, path: Path) -> None:
        self._path, self._num_rows = path, 0
        try:
            self._read(path)
        except _UNREADABLE as error:
            raise ValueError(
                f"{path} cannot be read; is it whole, and what its name says? {error}"
            ) from error

    def _read(self, path: Path) -> None:
        name = path.name
        if path.is_dir():
            self._read_saved(path)
        elif name.endswith(".npy"):
            self._read_array(path)
        elif name.endswith(".parquet"):
            self._read_parquet(path)
        elif name.endswith((".arrow", ".feather", ".ipc")):
            self._read_arrow(path)
        elif name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
            self._read_lines(path)
        else:
            raise ValueError(f"{path} is not a kind of file that is read here: {', '.join(_SUFFIXES)}.")

    def _read_array(self, path: Path) -> None:
        self.made_up = True
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a whole .npy file of numbers.") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"{path} has shape {array.shape} and dtype {array.dtype}; it must hold one whole number of tokens a row."
            )
        self._keep(array)

    def _read_saved(self, path: Path) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(f"{path} needs the package datasets: pip install 'multipack[data]'.") from error
        if not json.loads((path / "state.json").read_text())["_data_files"]:
            return  # a data set without rows, which datasets writes and cannot read
        saved = datasets.load_from_disk(str(path))
        name = self._choose(saved.column_names)
        table = saved.data.table.select([name])
        index = saved._indices
        if index is None:
            self._read_batches(table.to_batches(), table.num_rows)
            return
        lengths = [self._lengths(name, batch.column(0)) for batch in table.to_batches()]
        self._keep(np.concatenate(lengths)[index.column(0).to_numpy()])

    def _read_parquet(self, path: Path) -> None:
        with pq.ParquetFile(path) as file:
            name = self._choose(file.schema_arrow.names)
            self._read_batches(file.iter_batches(columns=[name]), file.metadata.num_rows)

    def _read_arrow(self, path: Path) -> None:
        with pa.memory_map(str(path)) as file:
            try:
                table = pa.ipc.open_stream(file).read_all()
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(file).read_all()
            self._read_batches(table.select([self._choose(table.column_names)]).to_batches(), table.num_rows)

    def _read_batches(self, batches: Iterable[pa.RecordBatch], num_rows: int) -> None:
        assert self.column is not None
        for batch in batches:
            self._keep(self._lengths(self.column, batch.column(0)))
            self._progress(self._path.name, self._num_rows, num_rows)

    def _read_lines(self, path: Path) -> None:
        total = path.stat().st_size
        with path.open("rb") as raw:
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            for rows in self._blocks(lines):
                name = self._choose(list(rows[0]))
                try:
                    values = [row[name] for row in rows]
                except KeyError:
                    raise ValueError(
                        f"{path}: row {self._num_rows + _first_without(rows, name)} has no {name!r}."
                    ) from None
                self._keep(self._lengths(name, _as_array(values, f"{path}, column {name!r}")))
                self._progress(path.name, raw.tell(), total)

    def _blocks(self, lines: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
        """Blocks of rows of JSON lines, or of one JSON array of rows."""
        rest = iter(lines)
        first = next(rest, b"")
        whole = first.lstrip().startswith(b"[")
        rows = iter(self._array(first + b"".join(rest)) if whole else self._rows(chain([first], rest)))
        while block := list(islice(rows, _LINES_AT_ONCE)):
            yield block

    def _array(self, text: bytes) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(text)
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{self._path} is an array of something other than rows: each must be {{...}}.")
        return rows

    def _rows(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{self._path}, line {number + 1} is not JSON: {error.msg}.") from error
            if not isinstance(row, dict):
                raise ValueError(  # noqa: TRY004 (a file of the wrong kind, not an argument)
                    f"{self._path}, line {number + 1} is not an object: each line must be one row, as {{...}}."
                )
            yield row

    def _choose(self, names: Sequence[str]) -> str:
        """The column to read; settled by the first file."""
        if self.column is None:
            self.column = next((name for name in COLUMNS if name in names), None)
        if self.column is None or self.column not in names:
            wanted = f"no column {self.column!r}" if self.column else "no column of a usual name"
            raise ValueError(
                f"{self._path} has {wanted}, only {', '.join(names) or 'empty rows'}: name one with --column."
            )
        return self.column

    def _lengths(self, name: str, values: pa.Array) -> NDArray[np.int64]:
        """Tokens of each value: its length, or the value itself, or what the tokenizer makes of it."""
        if values.null_count:
            row = self._num_rows + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise ValueError(f"{self._path}: row {row} of column {name!r} is null, which has no length.")
        kind = values.type
        if pa.types.is_integer(kind):
            self.made_up = True
            return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if is_list and _holds_numbers(kind.value_type):
            return np.asarray(pc.list_value_length(values).to_numpy(zero_copy_only=False), np.int64)
        is_conversation = is_list and pa.types.is_struct(kind.value_type)
        if is_conversation or pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return self._count(name, values.to_pylist())
        raise ValueError(
            f"column {name!r} of {self._path} is a {kind}: it must hold token lists, lengths, text or conversations."
        )

    def _count(self, name: str, values: list[Any]) -> NDArray[np.int64]:
        if self._tokenise is None:
            raise ValueError(
                f"column {name!r} of {self._path} holds text, and packing goes by tokens: give the tokenizer's folder with "
                "--tokenizer, or a column of token lists with --column."
            )
        self.made_up = True
        return np.array(self._tokenise(values), np.int64)

    def _keep(self, lengths: NDArray[Any]) -> None:
        wrong = (lengths < 0) | (lengths > _MOST_TOKENS)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"{self._path}: row {self._num_rows + row} has the length {lengths[row]}, outside 0..{_MOST_TOKENS}."
            )
        self.parts.append(lengths.astype(np.int64))
        self._num_rows += len(lengths)


def _holds_numbers(kind: pa.DataType) -> bool:
    """Also true of null, which is what JSON makes of rows that are all empty."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    return any(test(kind) for test in tests)


def _first_without(rows: Sequence[dict[str, Any]], name: str) -> int:
    return next(i for i, row in enumerate(rows) if name not in row)


def _as_array(values: list[Any], place: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"{place}: rows hold values of different kinds: {error}.") from error


def tokenizer_of(folder: Path) -> Tokenise:
    """Token counts by the tokenizer in a folder; conversations go through its chat template.

    Raises:
        ValueError: transformers is missing, or the folder holds no tokenizer.
    """
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder} is not a folder: nothing is fetched from a hub.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("--tokenizer needs transformers: pip install 'multipack[train]'.") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(" :")
        raise ValueError(f"--tokenizer {folder}: no tokenizer there ({reason}).") from error
    tokenizer.model_max_length = int(1e30)  # it would warn of each longer text

    def count(values: list[Any]) -> list[int]:
        if isinstance(values[0], str):
            return [len(ids) for ids in tokenizer(values)["input_ids"]]
        texts = tokenizer.apply_chat_template(values, tokenize=False)
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return count
