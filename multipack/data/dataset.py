"""Token sequences over Arrow, read in place.

A data set knows the length of every sequence from its offsets, and hands out selections: row ids, nothing
copied. The collator reads the rows. One rule: a row that a bin may hold is usable as it stands, so everything
that is wrong with the data (nulls, unequal columns, over-long rows) is found here, before the first batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from multipack.arguments import check_choice, whole_number
from multipack.data.columns import Columns
from multipack.data.overlong import DatasetReport, Overlong, Usable, apply_overlong, log_report
from multipack.data.packed_rows import PACKED, Sequences, packed_sequences
from multipack.data.part import Parts, append_end, parts_of, with_end
from multipack.data.reading import Located, lengths_of, read, read_scalars
from multipack.data.sources import Rows, Source, from_pickle, open_source, rows_to_table, to_pickle
from multipack.data.tables import read_columns, row_lengths
from multipack.data.targets import WithoutTargets, targets_of

Ids = TypeVar("Ids", bound=Sequence[int])


class TokenDataset(Dataset[dict[str, Any]]):
    """Sequences of tokens with everything that belongs to them.

    Args:
        source: a `datasets.Dataset` (memory-mapped or not, selected or shuffled), a `pyarrow.Table` or
            `RecordBatch`, a dict of columns, a list of rows (dicts, or sequences of tokens), or a pair
            `(values, offsets)` of flat arrays where row i is `values[offsets[i]:offsets[i + 1]]`. Arrow data
            and arrays are read where they lie. Files of tokens: what `megatron`, `token_file` and `olmo` of
            `multipack.data.token_files` give. Shards of an object store: what `multipack.data.remote.remote`
            gives.
        column: the column with the tokens; it is called "input_ids" from here on.
        max_length: longest sequence in tokens, usually the capacity of a bin. None: no bound.
        overlong: what to do with rows above `max_length`. "error"; "truncate" keeps their beginning; "split"
            makes fragments of at most `max_length` tokens, each a sequence of its own; "drop".
        columns: further columns to read; None reads all.
        without_targets: what to do with sequences of which no token is learnt, also because `max_length` cut
            the targets off: "keep" does not look, "drop" leaves them out, "error". Targets are what a
            collator makes of the columns; the first token of a sequence is none. Reads the labels, or the
            masks, of all rows once.
        end_token: a token to put behind every row, for data that were tokenised without it. It counts as a
            token of the row everywhere, `max_length` included. None: rows as they are.

    List columns of numbers are token columns and must have the lengths of `column` in every row. Columns of
    single numbers become one number a sequence. Any other column is passed on as Python objects. In tensors
    integers of any width are int64, floats of any width float32 and booleans bool, as `datasets` and
    `torch.tensor` of Python numbers have them. Rows of shape (1, L), as tokenizers return them with
    `return_tensors`, count as rows of length L.

    Rows that someone packed before are read with their boundaries: `seq_lengths` (a list of the lengths of
    their sequences) and `position_ids` that begin again at 0 make a sequence of each part, and are no columns
    of a batch.

    Empty rows are left out and counted in `report`. Reading is safe from several threads, and the data set
    pickles: a memory-mapped `datasets.Dataset` as its path, other sources with their data.

    Raises:
        ValueError: a column is missing, a row holds a null, token columns differ in length, offsets are
            corrupt, or a row is above `max_length`, or without a target, under "error". The message names the
            first such row.
        TypeError: the source, or the type of `column`, is not one of those above.
    """

    end_token: int | None
    """Token behind every row that no column holds; None: none."""
    columns: tuple[str, ...]
    """Names of all columns read, "input_ids" first."""
    lengths: npt.NDArray[Any]
    """Tokens of each usable sequence, all at least 1; uint16, uint32 or int64, as small as fits."""
    report: DatasetReport
    num_rows: int
    """Rows of the source, with those that are left out here."""

    def __init__(
        self,
        source: Any,
        *,
        column: str = "input_ids",
        max_length: int | None = None,
        overlong: Overlong = "error",
        columns: Sequence[str] | None = None,
        without_targets: WithoutTargets = "keep",
        end_token: int | None = None,
    ) -> None:
        check_choice("without_targets", without_targets, get_args(WithoutTargets))
        self._column = column
        self._wanted = columns
        self.end_token = None if end_token is None else whole_number("end_token", end_token, 0)
        opened = self._open(source)
        lengths = row_lengths(self._readers, opened)
        self.num_rows = len(lengths)
        packed = packed_sequences(self._boundaries, lengths, opened.index_map)
        self._check_end_and_targets(packed is not None, without_targets)
        if self.end_token is not None:
            lengths = with_end(lengths)
        usable = apply_overlong(lengths if packed is None else packed.lengths, max_length, overlong)
        self._rows, self._starts, self.lengths, self.report = (
            usable if packed is None else _inside(usable, packed)
        )
        self._table_rows = _table_rows(self._rows, opened.index_map)
        if without_targets != "keep":
            self._leave_out(
                targets_of(*self.read(self.locate(np.arange(len(self))))), error=without_targets == "error"
            )
            self._table_rows = _table_rows(self._rows, opened.index_map)
        log_report(self.report, overlong, max_length)

    @classmethod
    def from_iterable(
        cls,
        rows: Iterable[Any],
        *,
        column: str = "input_ids",
        max_length: int | None = None,
        overlong: Overlong = "error",
        columns: Sequence[str] | None = None,
        without_targets: WithoutTargets = "keep",
    ) -> TokenDataset:
        """Copy any iterable or map-style data set of rows into Arrow memory, once. Arguments as of the
        class."""
        return cls(
            rows_to_table(rows, column),
            column=column,
            max_length=max_length,
            overlong=overlong,
            columns=columns,
            without_targets=without_targets,
        )

    def _leave_out(self, targets: npt.NDArray[np.int64], *, error: bool) -> None:
        """Keep the sequences with a target, and say in the report how many had none."""
        kept = np.flatnonzero(targets)
        without = len(self) - len(kept)
        if error and without:
            sequence = int(np.flatnonzero(targets == 0)[0])
            raise ValueError(
                f"{without} of {len(self)} sequences have no target (row {self.rows[sequence]} is the "
                "first): they would cost compute and teach nothing. Raise max_length if it cut them off, or "
                "choose without_targets='drop'."
            )
        tokens = int(self.lengths.sum(dtype=np.int64))
        if without:
            self._rows, self.lengths = self.rows[kept], self.lengths[kept]
            self._starts = None if self._starts is None else self._starts[kept]
        left = int(self.lengths.sum(dtype=np.int64))
        self.report = replace(
            self.report,
            num_sequences=len(kept),
            num_tokens=left,
            num_target_tokens=int(targets.sum()),
            sequences_without_targets=without,
            tokens_without_targets=tokens - left,
        )

    def _open(self, source: Any) -> Source:
        opened = open_source(source, self._column, self._wanted)
        self._origin = opened.origin
        self._elsewhere: Rows | None = opened.rows
        self._readers = Columns() if opened.rows is not None else read_columns(opened, self._column)
        self._boundaries = {
            name: self._readers.tokens.pop(name) for name in PACKED if name in self._readers.tokens
        }
        here = (*self._readers.tokens, *self._readers.scalars, *self._readers.objects)
        self.columns = here if opened.rows is None else opened.rows.names
        return opened

    def _check_end_and_targets(self, is_packed: bool, without_targets: WithoutTargets) -> None:
        if self.end_token is not None and (is_packed or without_targets != "keep"):
            raise ValueError(
                f"end_token={self.end_token} ends rows, and does not go with "
                + ("rows that were packed before" if is_packed else f"without_targets={without_targets!r}")
                + ": put it into the rows when they are tokenised."
            )
        if without_targets != "keep" and self._elsewhere is not None and "labels" in self.columns:
            raise ValueError(
                f"without_targets={without_targets!r} would read all labels, which lie in a store or in "
                "files: drop such rows when they are written."
            )

    @property
    def readers(self) -> Columns:
        """The columns that lie here; none where rows lie elsewhere, see `read`."""
        return self._readers

    def read(self, located: Located) -> tuple[Columns, Located]:
        """The columns that hold some sequences, and where in them. Waits for a store, where the rows lie in
        one."""
        columns = self._readers
        if self._elsewhere is not None:
            columns, rows = self._elsewhere.read(located.rows)
            located = located._replace(rows=rows)
        if self.end_token is not None:
            held = lengths_of(columns.tokens["input_ids"], located.rows)
            starts = 0 if located.starts is None else located.starts
            located = located._replace(ends=starts + located.lengths > held)
        return columns, located

    def read_ahead(self, batches: Iterator[Ids]) -> Iterator[Ids]:
        """The same batches of ids. Where the rows lie in a store, some are taken early so that they can be
        fetched meanwhile."""
        if self._elsewhere is None:
            return batches
        return self._elsewhere.read_ahead(batches, self._rows_of)

    def _rows_of(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        numbers = np.array(ids, np.int64)
        return numbers if self._table_rows is None else self._table_rows[numbers]

    @property
    def shuffle_block(self) -> int:
        """Neighbours to permute as a whole, so that batches touch few blocks of a store; 1 where rows lie
        here."""
        return 1 if self._elsewhere is None else self._elsewhere.shuffle_block

    @property
    def elsewhere(self) -> Rows | None:
        """Rows that are no Arrow table: of mapped files, or of a store; None otherwise."""
        return self._elsewhere

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Row of the source of each sequence, int64."""
        return np.arange(len(self)) if self._rows is None else self._rows

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """First token of each sequence in its row, int64: above 0 only for later fragments of a split row."""
        return np.zeros(len(self), np.int64) if self._starts is None else self._starts

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """One sequence: int64, float32 or bool tensors of shape [length], scalars of shape [], objects as
        they are."""
        number = operator.index(index)
        return self.__getitems__([number + len(self) if number < 0 else number]).only()

    def __getitems__(self, ids: Sequence[int]) -> Selection:
        """The sequences with these ids, in this order. Nothing is read before the collator reads it.

        `ids` may carry `bin_offsets`, `bin_capacity`, `repeated` and `groups`, as the batches of our samplers
        do, and may be `Part`s of rows.
        """
        given = np.array(ids)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"ids must be whole numbers, not {given.dtype}: they are numbers of sequences")
        numbers: npt.NDArray[np.int64] = given.astype(np.int64, copy=False)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= len(self)):
            wrong = int(numbers[(numbers < 0) | (numbers >= len(self))][0])
            raise IndexError(f"sequence {wrong} is outside 0..{len(self) - 1}")
        bin_offsets = getattr(ids, "bin_offsets", (0, len(numbers)))
        repeated, bin_capacity = getattr(ids, "repeated", False), getattr(ids, "bin_capacity", 0)
        groups, parts = getattr(ids, "groups", None), parts_of(ids, self.lengths)
        return Selection(
            self,
            numbers,
            bin_offsets,
            repeated=repeated,
            bin_capacity=bin_capacity,
            groups=groups,
            parts=parts,
        )

    def locate(self, ids: npt.NDArray[np.int64]) -> Located:
        """Where the collator finds these sequences."""
        rows = ids if self._table_rows is None else self._table_rows[ids]
        starts = None if self._starts is None else self._starts[ids]
        return Located(rows, starts, self.lengths[ids].astype(np.int64))

    def source_rows(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row of the source of each of these sequences, as `rows[ids]` but without making `rows`."""
        return ids if self._rows is None else self._rows[ids]

    def __getstate__(self) -> dict[str, Any]:
        # The readers point into memory of this process; the receiver opens the source again.
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_readers", "_elsewhere", "_boundaries", "_table_rows")
        }
        return state | {"_origin": to_pickle(self._origin)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._table_rows = _table_rows(self._rows, self._open(from_pickle(self._origin)).index_map)


class Selection(Sequence[dict[str, Any]]):
    """The sequences of one batch: a data set and row ids. A collator reads it at once, others row by row."""

    __slots__ = ("bin_capacity", "bin_offsets", "dataset", "groups", "ids", "numbers", "parts", "repeated")

    def __init__(
        self,
        dataset: TokenDataset,
        ids: npt.NDArray[np.int64],
        bin_offsets: Sequence[int],
        *,
        repeated: bool = False,
        bin_capacity: int = 0,
        groups: Sequence[int] | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.dataset = dataset
        self.ids = ids
        self.bin_offsets = bin_offsets
        """Boundaries of the bins in `ids`: bin b holds ids[bin_offsets[b]:bin_offsets[b + 1]]."""
        self.bin_capacity = bin_capacity
        """Token slots of each bin; 0 where nothing was packed."""
        self.numbers: npt.NDArray[np.int64] | None = None
        """Row of a stream of each sequence, whose batches are data sets of their own."""
        self.repeated = repeated
        """The batch repeats another one to give every rank a batch; its labels must not count."""
        self.groups = groups
        """The group of each sequence, where some had to stay together."""
        self.parts = parts
        """Which tokens of each row are meant; None: all."""

    def locate(self) -> Located:
        """Where the collator finds the sequences."""
        located = self.dataset.locate(self.ids)
        if self.parts is None:
            return located
        starts = self.parts.starts if located.starts is None else located.starts + self.parts.starts
        return located._replace(starts=starts, lengths=self.parts.lengths)

    def only(self) -> dict[str, Any]:
        """The sequence of a selection of one."""
        columns, located = self.dataset.read(self.locate())
        row: dict[str, Any] = {name: read(column, located) for name, column in columns.tokens.items()}
        if located.ends is not None and located.ends[0]:
            append_end(row, self.dataset.end_token)
        for name, column in columns.scalars.items():
            row[name] = read_scalars(column, located)[0]
        for name, values in columns.objects.items():
            row[name] = values[int(located.rows[0])].as_py()
        return row

    def source_rows(self) -> npt.NDArray[np.int64]:
        """Row of the source of each sequence, int64, shape [num_sequences]."""
        return self.dataset.source_rows(self.ids) if self.numbers is None else self.numbers

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        one = [range(len(self))[index]]
        parts = None if self.parts is None else Parts(self.parts.starts[one], self.parts.lengths[one])
        return Selection(self.dataset, self.ids[one], (0, 1), parts=parts).only()


def _inside(usable: Usable, packed: Sequences) -> Usable:
    """The usable ones of sequences that lie inside rows."""
    chosen = slice(None) if usable.rows is None else usable.rows
    starts = packed.starts[chosen] + (0 if usable.starts is None else usable.starts)
    return usable._replace(rows=packed.rows[chosen], starts=starts)


def _table_rows(
    rows: npt.NDArray[np.int64] | None, index_map: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64] | None:
    if index_map is None:
        return rows
    return index_map if rows is None else index_map[rows]
