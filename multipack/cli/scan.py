"""The lengths of all rows of whatever holds them: data files, a saved data set, an array.

One rule: rows are read and made tokens by what training reads and makes them with, so both agree to the
token. Of token columns of Arrow data only the offsets are read, never the tokens; text is tokenised in blocks
and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from multipack.data.columns import is_list, is_number
from multipack.data.text.arrow_rows import batch_rows, open_saved
from multipack.data.text.files import Block, data_files, kind_of, naming, read_blocks, say_unread_files
from multipack.data.text.formats import RowFormat, choose_format, matters_beside_tokens

if TYPE_CHECKING:
    from multipack.data.text.encode import RowEncoder

LENGTHS = ("length", "lengths", "num_tokens")
"""Columns that are taken for counts of tokens where none is named and no format fits."""
_TOKENS = ("input_ids", "tokens")
_ROWS_AT_ONCE = 1024
_MOST_TOKENS = 1 << 40
"""Of a row: sums over 2^22 such rows still fit 64 bits, and a larger number is not a count of tokens."""


class Progress(Protocol):
    """Told of `done` out of `total` rows of the file that is read; 0: their number is unknown."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


Tokenise = Callable[[RowFormat], "RowEncoder"]
"""What makes tokens of rows of a format."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows become tokens, as the keys of a training run say it."""

    type: str = "auto"
    fields: Mapping[str, str] = field(default_factory=dict)
    """Name of the format -> name of the file."""
    ignore_fields: Sequence[str] = ()


@dataclass(frozen=True)
class Scanned:
    """What was found."""

    lengths: NDArray[np.int64]
    """Tokens of every sequence, empty ones included, shape [num_sequences]."""
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
    reading: Reading | None = None,
) -> Scanned:
    """Lengths of all sequences of files and folders.

    Args:
        column: token lists, lengths, or, with `tokenise`, texts or conversations; None to look for a usual
            name.
        split: of a saved DatasetDict, or of a folder whose files are named by splits.

    Raises:
        ValueError: nothing to read, an unknown kind of file, a column that is missing or holds something
            else, a null.
    """
    reader = _Reader(column, tokenise, progress, reading or Reading())
    files = 0
    for path in paths:
        found = scanned_files(path, split)
        if not any(file.suffix.lower() == ".npy" for file in found):
            say_unread_files(path, split)
        for file in found:
            reader.read(file)
            files += 1
    if not any(len(part) for part in reader.parts):
        raise ValueError(f"{', '.join(map(str, paths))} holds no rows.")
    reader.finish(", ".join(map(str, paths)))
    return Scanned(np.concatenate(reader.parts), reader.name or "lengths", files, reader.made_up)


def scanned_files(path: Path, split: str | None) -> list[Path]:
    """The files that an argument means: those that training reads, and arrays of lengths."""
    if path.is_file() and path.suffix.lower() == ".npy":
        return [path]
    arrays = sorted(path.rglob("*.npy")) if path.is_dir() else []
    if arrays and not any(kind_of(file) for file in path.rglob("*") if file.is_file()):
        return arrays
    return data_files(path, split)


class _Reader:
    """Collects lengths; the first file settles where they come from."""

    def __init__(
        self, column: str | None, tokenise: Tokenise | None, progress: Progress, reading: Reading
    ) -> None:
        self.name: str | None = None
        self.parts: list[NDArray[np.int64]] = []
        self.made_up = False
        self._column = column
        self._tokenise = tokenise
        self._progress = progress
        self._reading = reading
        self._encoder: RowEncoder | None = None
        self._path = Path()
        self._num_rows = 0

    def read(self, path: Path) -> None:
        self._path, self._num_rows = path, 0
        if path.suffix.lower() == ".npy":
            with naming(path):
                self._read_array(path)
            return
        with naming(path):
            opened = _open_arrow(path)
        if opened is None:
            self._read_blocks(read_blocks(path, size=_ROWS_AT_ONCE))
        elif opened.schema is not None:
            self._read_arrow(opened)

    def finish(self, name: str) -> None:
        """Say what of the rows was not read."""
        if self._encoder is not None:
            self._encoder.say_unread(name)

    def _read_array(self, path: Path) -> None:
        self.made_up = True
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a whole .npy file of numbers.") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"{path} has shape {array.shape} and dtype {array.dtype}; it must hold one whole number of "
                "tokens a row."
            )
        self._keep(array)

    def _read_arrow(self, opened: _Arrow) -> None:
        """Offsets alone where a column holds tokens or lengths; else rows."""
        assert opened.schema is not None
        names = opened.schema.names
        name = self._numbers(names)
        if name is not None and not (name in _TOKENS and matters_beside_tokens(names)):
            kind = opened.schema.field(name).type
            counted = pa.types.is_integer(kind) and (self._column is not None or name not in _TOKENS)
            if counted or (is_list(kind) and _holds_numbers(kind.value_type)):
                self.name = name
                for batch in _named(self._path, opened.batches([name])):
                    with naming(self._path):
                        batch.validate()
                    self._keep(self._lengths(name, batch.column(0)))
                    self._progress(self._path.name, self._num_rows, opened.num_rows)
                return
        self._read_blocks(self._blocks_of(opened))

    def _blocks_of(self, opened: _Arrow) -> Iterator[Block]:
        first_row = 0
        for batch in _named(self._path, opened.batches(None)):
            with naming(self._path):
                rows = batch_rows(batch)
            yield Block(self._path, first_row, rows)
            first_row += batch.num_rows

    def _read_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            names = list(dict.fromkeys(name for row in block.rows for name in row))
            if self._column is not None and self._column not in names:
                raise ValueError(
                    f"{self._path} has no column {self._column!r}, only {', '.join(names) or 'empty rows'}: "
                    "name one with --column."
                )
            counts = self._counts(names, block)
            if counts is not None:
                self.made_up = True
                self._keep(counts)
            else:
                self._encoder = self._encoder or self._encoder_of(names, block)
                self._keep(np.array([len(one.input_ids) for one in self._encoder.encode(block)], np.int64))
            self._progress(self._path.name, block.first_row + len(block.rows), 0)

    def _numbers(self, names: Sequence[str]) -> str | None:
        """The column that may hold tokens or lengths."""
        if self._column is not None:
            if self._column not in names:
                raise ValueError(
                    f"{self._path} has no column {self._column!r}, only {', '.join(names) or 'empty rows'}: "
                    "name one with --column."
                )
            return self._column
        if self._encoder is None and self.name is not None and self.name in names:
            return self.name
        tokens = next((name for name in _TOKENS if name in names), None)
        if tokens is not None and self._reading.type in ("auto", "tokens"):
            return tokens
        return self._counted(names)

    def _counted(self, names: Sequence[str]) -> str | None:
        """A column of lengths, where it is all that there is to go by."""
        counted = next((name for name in LENGTHS if name in names), None)
        if self._tokenise is None or counted is None:
            return counted
        try:
            self._choose(names)
        except ValueError:
            return counted
        return None

    def _counts(self, names: Sequence[str], block: Block) -> NDArray[np.int64] | None:
        """Lengths that the rows hold as numbers; None: the rows hold something else."""
        name = self._numbers(names)
        if name is None or name in _TOKENS:
            return None
        values = [row.get(name) for row in block.rows]
        if name != self._column or isinstance(values[0], int | float):
            for row, value in enumerate(values, block.first_row):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ValueError(  # noqa: TRY004 (a file of the wrong kind, not an argument)
                        f"{self._path}: row {row}: {name} is {value!r}, not a number of tokens."
                    )
                self._check(row, value)
            self.name = name
            return np.array(values, np.int64)
        return None

    def _encoder_of(self, names: Sequence[str], block: Block) -> RowEncoder:
        from multipack.data.text.encode import RowEncoder

        try:
            row_format = self._choose(names, block)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error
        self.name = row_format.columns[0]
        if row_format.name == "tokens":
            self.made_up = True
            return RowEncoder(row_format, None)
        if self._tokenise is None:
            raise ValueError(
                f"column {self.name!r} of {self._path} holds text, and packing goes by tokens: give the "
                "tokenizer's folder with --tokenizer, or a column of token lists with --column."
            )
        self.made_up = True
        return self._tokenise(row_format)

    def _choose(self, names: Sequence[str], block: Block | None = None) -> RowFormat:
        reading = self._reading
        fields, wanted = dict(reading.fields), reading.type
        if self._column is not None and block is not None:
            ours = _kind_of_cell(
                next((v for row in block.rows if (v := row.get(self._column)) is not None), None)
            )
            wanted, fields = ours[0], {**fields, ours[1]: self._column} if ours[1] != self._column else fields
        elif (
            wanted == "auto" and "input_ids" not in names and "tokens" in names and "input_ids" not in fields
        ):
            fields["input_ids"] = "tokens"
        return choose_format(wanted, names, fields=fields, ignored=reading.ignore_fields)

    def _lengths(self, name: str, values: pa.Array) -> NDArray[np.int64]:
        """Tokens of each value: its length, or the value itself."""
        if values.null_count:
            row = self._num_rows + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise ValueError(
                f"{self._path}: row {row}: {name} is None, not a list of tokens. Remove the row or fill the "
                "cell."
            )
        if pa.types.is_integer(values.type):
            self.made_up = True
            return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)
        return np.asarray(pc.list_value_length(values).to_numpy(zero_copy_only=False), np.int64)

    def _keep(self, lengths: NDArray[Any]) -> None:
        wrong = (lengths < 0) | (lengths > _MOST_TOKENS)
        if wrong.any():
            row = int(np.argmax(wrong))
            self._check(self._num_rows + row, int(lengths[row]))
        self.parts.append(lengths.astype(np.int64))
        self._num_rows += len(lengths)

    def _check(self, row: int, length: int) -> None:
        if not 0 <= length <= _MOST_TOKENS:
            raise ValueError(f"{self._path}: row {row} has the length {length}, outside 0..{_MOST_TOKENS}.")


def _kind_of_cell(value: Any) -> tuple[str, str]:
    """The format of a column that was named, and what the format calls it."""
    if isinstance(value, str):
        return "text", "text"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "messages", "messages"
    return "tokens", "input_ids"


def _holds_numbers(kind: pa.DataType) -> bool:
    """Also true of null, which is what rows become that are all empty."""
    return is_number(kind) or pa.types.is_null(kind)


@dataclass(frozen=True)
class _Arrow:
    """Arrow data on disk."""

    schema: pa.Schema | None
    """None: a saved data set without rows."""
    num_rows: int
    batches: Callable[[list[str] | None], Iterable[pa.RecordBatch]]
    """Batches of these columns, or of all."""


def _named(path: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; what goes wrong while they are read names the file."""
    with naming(path):
        yield from batches


def _open_arrow(path: Path) -> _Arrow | None:
    """Arrow data as they lie; None: another kind of file."""
    if path.is_dir():
        return _open_saved(path)
    kind = kind_of(path)
    if kind == "parquet":
        file = pq.ParquetFile(path)
        return _Arrow(
            file.schema_arrow,
            file.metadata.num_rows,
            lambda names: file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names),
        )
    if kind == "arrow":
        source = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(source).read_all()
        return _of_table(table)
    return None


def _open_saved(path: Path) -> _Arrow:
    saved = open_saved(path)
    if saved is None:
        return _Arrow(None, 0, lambda names: ())
    if saved._indices is None:
        return _of_table(saved.data.table)
    selected = saved.with_format("arrow")

    def batches(names: list[str] | None) -> Iterator[pa.RecordBatch]:
        chosen = selected if names is None else selected.select_columns(names)
        for first in range(0, len(saved), _ROWS_AT_ONCE):
            yield from chosen[first : first + _ROWS_AT_ONCE].combine_chunks().to_batches()

    return _Arrow(saved.data.table.schema, len(saved), batches)


def _of_table(table: pa.Table) -> _Arrow:
    def read(names: list[str] | None) -> Iterable[pa.RecordBatch]:
        chosen = table if names is None else table.select(names)
        batches: list[pa.RecordBatch] = chosen.to_batches(max_chunksize=None if names else _ROWS_AT_ONCE)
        return batches

    return _Arrow(table.schema, table.num_rows, read)


def tokenizer_of(folder: Path, *, chat_template: Path | None = None, train_on: str = "all") -> Tokenise:
    """Tokens by the tokenizer in a folder; conversations go through its chat template, or another one.

    Raises:
        ValueError: transformers is missing, the folder holds no tokenizer, or the file no template.
    """
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder} is not a folder: nothing is fetched from a hub.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("--tokenizer needs transformers: pip install 'multipack[train]'.") from error
    from multipack.data.text.encode import RowEncoder
    from multipack.data.text.templates import check_source

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(" :")
        raise ValueError(f"--tokenizer {folder}: no tokenizer there ({reason}).") from error
    if chat_template is not None:
        with naming(chat_template):
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        check_source(tokenizer.chat_template)
    last = train_on == "last"
    return lambda row_format: RowEncoder(row_format, tokenizer, train_on="last" if last else "all")
