"""Make a batch of the sequences of a selection.

Tensors are allocated here and written by the compiled reader, each once and without the GIL. Rows that come
as plain dicts take the same way through a small data set of their own, so both give the same batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from multipack import _core
from multipack.arguments import check_choice, whole_number
from multipack.data.alignment import stored_lengths
from multipack.data.batch_columns import check_columns, label_columns, wide
from multipack.data.block_mask import block_tables
from multipack.data.columns import Columns
from multipack.data.dataset import Selection, TokenDataset
from multipack.data.loss_weights import add_loss_weights
from multipack.data.reading import Located, read_scalars
from multipack.data.static import StaticShape, round_up

Batch = dict[str, Any]

_NOT_COPIED = ("input_ids", "labels", "attention_mask")
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class _Slots:
    """Where the sequences of a batch go, counted through its rows. Slots outside them are padding."""

    shape: tuple[int, int]
    places: npt.NDArray[np.int64]
    """First slot of each sequence, ascending."""
    boundaries: npt.NDArray[np.int32] | None = None
    """Where segments begin, and the number of slots; None: no positions are made."""
    first_position: int = 0
    firsts: npt.NDArray[np.int64] | None = None
    """Slots whose label nothing predicts; None: the first of each sequence."""


@dataclass(frozen=True, kw_only=True)
class _Collator:
    """The columns of a batch, which are the same for every layout."""

    pad_token_id: int = 0
    """Token in padding slots. What is padding is never read from it, so it may also be a real token."""
    ignore_index: int = -100
    """Label of slots that are no target."""
    mask_first_label: bool = True
    """The first label of each sequence is `ignore_index`, because nothing of its own sequence predicts it."""
    return_indices: bool = False
    """Add `indices`: the row of the source of each sequence, int64 [num_sequences]."""

    loss_weights: str | None = None
    """How much targets count in the loss: "sequences" (each sequence 1, its targets alike), "tokens" (each
    target 1), or a column of weights, one a token or one a sequence. Adds `loss_weights`, float32 beside the
    labels, and their sum `sum_loss_weights`."""

    def __post_init__(self) -> None:
        whole_number("pad_token_id", self.pad_token_id)
        whole_number("ignore_index", self.ignore_index)

    def _batch(self, selection: Selection, located: Located, slots: _Slots) -> Batch:
        columns, located = selection.dataset.read(located)
        check_columns(columns, located)
        batch: Batch = {}
        num_targets = self._write_tokens(batch, columns, located, slots, selection.dataset.end_token)
        for name, column in columns.scalars.items():
            batch[name] = read_scalars(column, located)
        for name, values in columns.objects.items():
            batch[name] = [values[row].as_py() for row in located.rows.tolist()]
        if "labels" in columns.scalars:
            num_targets = int((batch["labels"] != self.ignore_index).sum())
        if selection.repeated:
            batch["labels"].fill_(self.ignore_index)
            num_targets = 0
        if self.loss_weights is not None:
            add_loss_weights(batch, self.loss_weights, slots.places, self.ignore_index)
        if selection.groups is not None and "group" not in batch:
            batch["group"] = torch.tensor(selection.groups, dtype=torch.int64)
        if self.return_indices:
            batch["indices"] = torch.from_numpy(selection.source_rows())
        batch["num_tokens"] = 0 if selection.repeated else int(located.lengths.sum())
        batch["num_sequences"] = 0 if selection.repeated else len(selection)
        batch["num_target_tokens"] = num_targets
        batch["num_slots"] = slots.shape[0] * slots.shape[1]
        batch["num_bins"] = len(selection.bin_offsets) - 1
        batch["bin_capacity"] = selection.bin_capacity
        return batch

    def _write_tokens(
        self, batch: Batch, columns: Columns, located: Located, slots: _Slots, end_token: int | None
    ) -> int:
        """Make all tensors of one number a slot; returns the number of labels that are targets."""

        def new(name: str, dtype: torch.dtype) -> npt.NDArray[Any]:
            batch[name] = torch.empty(slots.shape, dtype=dtype)
            return batch[name].numpy()  # type: ignore[no-any-return]

        num_slots = slots.shape[0] * slots.shape[1]
        gather = _core.Gather(located.rows, located.starts, located.stored, slots.places, num_slots)
        tokens = columns.tokens["input_ids"]
        gather.tokens(tokens.reader, new("input_ids", wide(tokens)), self.pad_token_id)
        label_column, masks = label_columns(columns)
        if label_column is not None:
            readers = [columns.tokens[name].reader for name in masks]
            out = new("labels", wide(label_column))
            mask_first = self.mask_first_label and slots.firsts is None
            gather.labels(label_column.reader, readers, out, self.ignore_index, mask_first)
        for name, column in columns.tokens.items():
            if name not in _NOT_COPIED and name not in masks:
                gather.tokens(column.reader, new(name, column.dtype), 0)
        if slots.boundaries is not None:
            positions, seq_idx = new("position_ids", torch.int64), new("seq_idx", torch.int32)
            gather.segments(slots.boundaries, positions, seq_idx, slots.first_position, slots.shape[1])
        num_targets = gather.run()
        if located.ends is not None:
            num_targets += self._write_ends(batch, located, slots, end_token, is_target=not masks)
        if slots.firsts is not None and self.mask_first_label and label_column is not None:
            firsts = batch["labels"].view(-1)[slots.firsts]
            num_targets -= int((firsts != self.ignore_index).sum())
            batch["labels"].view(-1)[slots.firsts] = self.ignore_index
        return num_targets

    def _write_ends(
        self, batch: Batch, located: Located, slots: _Slots, end_token: int | None, is_target: bool
    ) -> int:
        """The end token of sequences that have one; returns how many of them are targets."""
        at = (slots.places + located.lengths - 1)[located.ends]
        batch["input_ids"].view(-1)[at] = end_token
        if not is_target or "labels" not in batch:
            return 0
        if (
            self.mask_first_label and slots.firsts is None
        ):  # nothing of its own sequence predicts an end token that stands alone
            at = at[located.stored[located.ends] > 0]
        batch["labels"].view(-1)[at] = end_token
        return len(at)

    def _as_selection(self, features: Sequence[Mapping[str, Any]]) -> Selection:
        if not isinstance(features, Selection):
            if self.return_indices:
                raise ValueError(
                    "rows given as dicts do not know their row of the source, which return_indices asks "
                    "for. Let the loader fetch them by TokenDataset.__getitems__, or carry the row in a "
                    "column."
                )
            dataset = TokenDataset(list(features))
            features = dataset.__getitems__(range(len(dataset)))
        if not len(features):
            raise ValueError("a batch needs at least one sequence with a token; this one has none")
        return features


@dataclass(frozen=True, kw_only=True)
class PackedCollator(_Collator):
    """Put sequences one after the other, without a mask between them and without padding where none is asked
    for.

    A batch is a dict of
    - `input_ids`, `labels`, `position_ids` (int64) and `seq_idx` (int32), all of shape [1, T] ("flat") or
      [bins, capacity] ("rows"). Positions and `seq_idx` start again with each sequence and each row of the
      batch, respectively.
    - `cu_seq_lens_q` and `cu_seq_lens_k`, one int32 tensor: strictly increasing boundaries of the segments of
      the flattened batch, from 0 to its number of slots. The padding at the end of a row is one segment of
      its own, so that no token attends to it. `max_length_q` and `max_length_k` are the longest segment, an
      int; with `max_length_to` its next multiple.
    - further token columns in the shape of `input_ids` (0 where padded), one number a sequence for scalar
      columns, a list for anything else. There is never an `attention_mask`: a mask of ones makes models treat
      the batch as one sequence.
    - `group`, int64 [num_sequences], where sequences had to stay together: equal numbers are one group. A
      column of that name in the data stays what it is.
    - ints `num_tokens` (without padding), `num_sequences` (without padding) and `num_target_tokens` (labels
      that are not `ignore_index`), all 0 for a batch that only repeats another; `num_slots` (with padding),
      `num_bins` and `bin_capacity` (0 where nothing was packed).

    >>> batch = collate(rows([11, 12, 13], [21, 22]))          # capacity 6, pad_to="capacity"
    input_ids     11  12  13  21  22   0
    labels      -100  12  13 -100 22 -100
    position_ids   0   1   2   0   1   0
    cu_seq_lens_q  0           3       5   6

    Labels are unshifted, as transformers' models expect: the `labels` column as it is, else `input_ids` where
    each of `loss_mask`, `assistant_masks`, `assistant_mask` and `completion_mask` that is there is nonzero. A
    selection marked as repeated has no targets.

    `static=True` gives every batch of a run the same shapes, the last of an epoch and repeats included, as
    torch.compile(dynamic=False) and CUDA graphs need them:
    - `cu_seq_lens_q` has bins_per_batch * (max_sequences_per_bin + 1) + 1 entries and is non-decreasing: what
      is left over are empty segments at the end of the batch ("flat") or of each row ("rows"), which
      attention must skip. The padding of a flat batch is cut into segments of at most `capacity` slots.
    - `max_length_q` and `max_length_k` are `capacity`.
    - tensors of one number a sequence (scalar columns, `indices`) have bins_per_batch * max_sequences_per_bin
      entries, of which the first `num_sequences` count; the rest is 0, in labels `ignore_index`, in `indices`
      -1.
    - the int `num_segments` counts the segments that are not empty. It and the other `num_...` change from
      batch to batch: pass them to a compiled function as tensors, not as ints.

    Four sequences of one token column, capacity 5, max_sequences_per_bin=3, bins_per_batch=2,
    pad_to="capacity":
    ```
    input_ids       11  12  21  31  32  33  41   0   0   0
    position_ids     0   1   0   0   1   2   0   0   1   2
    cu_seq_lens_q    0       2   3           6   7         10  10  10  10
    ```

    Raises:
        ValueError: a bin does not fit the capacity, or has more sequences than `max_sequences_per_bin`, or
            the batch more bins than `bins_per_batch` under `static`, a row was padded before (its
            `attention_mask` holds a 0), a column has the name of something made here, or the batch has no
            sequence.
    """

    layout: Literal["flat", "rows"] = "flat"
    """"flat": one row with all sequences. "rows": a row a bin, `capacity` slots each."""
    capacity: int | None = None
    """Token slots of a bin, for rows that were not packed by our samplers, whose batches carry it."""
    pad_to: Literal["capacity"] | int | None = None
    """Slots of a flat batch: as many as tokens (None), the capacity of its bins, or a multiple of a
    number."""
    align_to: int = 1
    """Each sequence takes a multiple of this many slots. Its segment includes the slots after its end (labels
    `ignore_index`), and `cu_seq_lens_real` has the boundaries without them."""
    boundaries: Literal["document", "bin"] = "document"
    """What attention and positions know of: each sequence alone, or all of a "bin" as one, whose first label
    alone is masked."""
    position_start: int = 0
    """Position of the first token of each sequence; RoBERTa-like models count from `padding_idx + 1`, mostly
    2."""
    max_length_to: int | None = None
    """`max_length_q` and `max_length_k` are the next multiple of this, so that few values of them occur: each
    one is compiled."""
    block_mask: int | None = None
    """Side of FlexAttention's blocks in tokens, mostly 128: adds what
    `multipack.data.block_mask.block_mask(batch)` makes a BlockMask of, so that the loader's thread does the
    work."""
    static: bool = False
    """All batches have equal shapes and an equal `max_length_q`; needs `max_sequences_per_bin` and rows or
    pad_to="capacity"."""
    max_sequences_per_bin: int | None = None
    """With `static`: most sequences of a bin, as the bins were planned."""
    bins_per_batch: int = 1
    """With `static`: bins of a full batch, as the batch sampler has them."""

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ("flat", "rows"))
        check_choice("boundaries", self.boundaries, ("document", "bin"))
        if self.boundaries == "bin" and self.align_to != 1:
            raise ValueError(
                f"align_to={self.align_to} leaves slots between the sequences of a bin, which "
                "boundaries='bin' makes one sequence: use one of the two."
            )
        if self.layout == "rows" and self.pad_to is not None:
            raise ValueError(
                f"pad_to={self.pad_to!r} is for layout='flat'; rows always have `capacity` slots"
            )
        super().__post_init__()
        if self.capacity is not None:
            whole_number("capacity", self.capacity, 1)
        if self.pad_to not in (None, "capacity"):
            whole_number("pad_to", self.pad_to, 1)
        whole_number("align_to", self.align_to, 1)
        whole_number("position_start", self.position_start)
        if self.max_length_to is not None:
            whole_number("max_length_to", self.max_length_to, 1)
        if self.block_mask is not None:
            whole_number("block_mask", self.block_mask, 2)
        self._check_static()

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Batch:
        """Collate a selection of a TokenDataset, or rows as dicts (same batch, slower)."""
        selection = self._as_selection(features)
        located = selection.locate()
        stored = stored_lengths(located.lengths, self.align_to)
        bin_offsets = np.asarray(selection.bin_offsets)
        capacity = self._capacity_of(selection)
        if capacity:
            _check_fit(stored, bin_offsets, capacity)
        shape = self._static_shape(capacity)
        if shape:
            bin_offsets = shape.bin_offsets(bin_offsets)
        if self.layout == "flat":
            slots = self._flat_slots(stored, capacity * (len(bin_offsets) - 1))
            if shape:
                slots = _with_padding_cut(slots, shape, int(stored.sum()))
        else:
            slots = self._row_slots(stored, bin_offsets, capacity)
        if self.boundaries == "bin":
            slots = _of_bins(slots, bin_offsets)
        batch = self._batch(selection, located, slots)
        if shape:
            self._add_static_segments(batch, slots, shape, located.lengths)
        else:
            self._add_segments(batch, slots, located.lengths)
        if self.block_mask is not None:
            batch |= block_tables(batch["cu_seq_lens_q"].numpy(), *slots.shape, self.block_mask)
            batch["block_size"] = self.block_mask
        return batch

    def _add_segments(self, batch: Batch, slots: _Slots, lengths: npt.NDArray[np.int64]) -> None:
        assert slots.boundaries is not None
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.from_numpy(slots.boundaries)
        longest = round_up(int(np.diff(slots.boundaries).max()), self.max_length_to)
        batch["max_length_q"] = batch["max_length_k"] = longest
        if self.align_to > 1:
            batch["cu_seq_lens_real"] = torch.from_numpy(_boundaries_of(lengths))

    def _add_static_segments(
        self, batch: Batch, slots: _Slots, shape: StaticShape, lengths: npt.NDArray[np.int64]
    ) -> None:
        assert slots.boundaries is not None
        shape.pad_sequences(batch, {"labels": self.ignore_index, "indices": -1})
        fill = shape.flat_boundaries if self.layout == "flat" else shape.row_boundaries
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.from_numpy(fill(slots.boundaries))
        batch["max_length_q"] = batch["max_length_k"] = shape.capacity
        batch["num_segments"] = len(slots.boundaries) - 1
        if self.align_to > 1:
            batch["cu_seq_lens_real"] = torch.from_numpy(shape.real_boundaries(_boundaries_of(lengths)))

    def _check_static(self) -> None:
        """Refuse what `static` needs and has not, and what only `static` reads."""
        whole_number("bins_per_batch", self.bins_per_batch, 1)
        if self.max_sequences_per_bin is not None:
            whole_number("max_sequences_per_bin", self.max_sequences_per_bin, 1)
        if not self.static:
            return
        if self.layout == "flat" and self.pad_to != "capacity":
            raise ValueError(
                f"static=True with layout='flat' and pad_to={self.pad_to!r}: the number of slots would "
                "change from batch to batch. Use pad_to='capacity', or layout='rows'."
            )
        if self.max_sequences_per_bin is None:
            raise ValueError(
                "static=True needs max_sequences_per_bin, for which the boundaries have room: the number "
                "that the bins are planned with, such as the capacity over a typical length."
            )
        if self.max_length_to is not None:
            raise ValueError(
                f"max_length_to={self.max_length_to} has no effect with static=True, where max_length_q is "
                "the capacity: leave it out."
            )

    def _static_shape(self, capacity: int) -> StaticShape | None:
        if not self.static:
            return None
        assert self.max_sequences_per_bin is not None
        return StaticShape(
            bins=self.bins_per_batch, capacity=capacity, max_sequences_per_bin=self.max_sequences_per_bin
        )

    def _capacity_of(self, selection: Selection) -> int:
        """Token slots of a bin, 0 where that is unknown and not needed."""
        if self.capacity and selection.bin_capacity and self.capacity != selection.bin_capacity:
            raise ValueError(
                f"the bins were packed with a capacity of {selection.bin_capacity} and the collator has "
                f"{self.capacity}: leave the collator's out, since the batches of our samplers carry it."
            )
        capacity = selection.bin_capacity or self.capacity or 0
        if not capacity and (self.layout == "rows" or self.pad_to == "capacity"):
            raise ValueError(
                "layout='rows' and pad_to='capacity' need the capacity of a bin in token slots, which these "
                "rows do not carry: pass PackedCollator(capacity=...)."
            )
        return capacity

    def _flat_slots(self, stored: npt.NDArray[np.int64], room: int) -> _Slots:
        ends = np.cumsum(stored)
        used = int(ends[-1])
        if self.pad_to is None:
            num_slots = used
        else:
            num_slots = room if self.pad_to == "capacity" else -(-used // self.pad_to) * self.pad_to
        _check_int32(num_slots)
        boundaries = np.empty(len(ends) + 1 + (num_slots > used), np.int32)
        boundaries[0] = 0
        boundaries[1 : len(ends) + 1] = ends
        boundaries[-1] = num_slots
        return _Slots((1, num_slots), ends - stored, boundaries, self.position_start)

    def _row_slots(
        self, stored: npt.NDArray[np.int64], bin_offsets: npt.NDArray[np.int64], capacity: int
    ) -> _Slots:
        num_bins = len(bin_offsets) - 1
        ends = np.concatenate(([0], np.cumsum(stored)))
        used = np.diff(ends[bin_offsets])
        num_slots = num_bins * capacity
        _check_int32(num_slots)
        first_slots = np.arange(num_bins) * capacity
        places = ends[:-1] + np.repeat(first_slots - ends[bin_offsets[:-1]], np.diff(bin_offsets))
        padding = (first_slots + used)[used < capacity]
        boundaries = np.sort(np.concatenate((places, padding, [num_slots]))).astype(np.int32)
        return _Slots((num_bins, capacity), places, boundaries, self.position_start)


@dataclass(frozen=True, kw_only=True)
class PaddedCollator(_Collator):
    """Give each sequence a row of its own, padded to the longest: what packing saves, for evaluation and
    comparison.

    A batch has `input_ids`, `labels` and `attention_mask` (int64, [num_sequences, longest]), and the further
    columns and counts of PackedCollator, with the same labels: packed or padded, the same tokens are targets.
    `attention_mask` is made from the lengths, so that a last token equal to `pad_token_id` still counts.
    Padding on the left comes with `position_ids` (int64, of that shape) which count from the first token, 0
    in the padding: models would count from the padding.
    """

    padding_side: Literal["right", "left"] = "right"
    pad_to: int = 1
    """Row length is a multiple of this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("padding_side", self.padding_side, ("right", "left"))
        whole_number("pad_to", self.pad_to, 1)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Batch:
        """Collate a selection of a TokenDataset, or rows as dicts (same batch, slower)."""
        selection = self._as_selection(features)
        located = selection.locate()
        lengths = located.lengths
        width = -(-int(lengths.max()) // self.pad_to) * self.pad_to
        places = np.arange(len(lengths)) * width
        slots = np.arange(width)
        if self.padding_side == "right":
            attention_mask = slots < lengths[:, None]
        else:
            places += width - lengths
            attention_mask = slots >= width - lengths[:, None]
        batch = self._batch(selection, located, _Slots((len(lengths), width), places))
        batch["attention_mask"] = torch.from_numpy(attention_mask.astype(np.int64))
        if self.padding_side == "left":
            positions = np.maximum(slots - (width - lengths[:, None]), 0)
            batch["position_ids"] = torch.from_numpy(positions.astype(np.int64))
        return batch


def _with_padding_cut(slots: _Slots, shape: StaticShape, used: int) -> _Slots:
    assert slots.boundaries is not None
    return replace(slots, boundaries=shape.cut_padding(slots.boundaries, used))


def _boundaries_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _of_bins(slots: _Slots, bin_offsets: npt.NDArray[np.int64]) -> _Slots:
    """The same slots with one segment a bin, and one for the padding of a row or of the batch."""
    assert slots.boundaries is not None
    firsts = slots.places[bin_offsets[:-1]]
    inner = np.setdiff1d(slots.places, firsts)
    kept = slots.boundaries[~np.isin(slots.boundaries, inner)]
    return dataclasses.replace(slots, boundaries=kept, firsts=firsts)


def _check_int32(num_slots: int) -> None:
    if num_slots > _MAX_INT32:
        raise ValueError(
            f"{num_slots} slots in one batch are above 2^31 - 1, the range of cu_seq_lens: use fewer bins"
        )


def _check_fit(stored: npt.NDArray[np.int64], bin_offsets: npt.NDArray[np.int64], capacity: int) -> None:
    used = np.diff(np.concatenate(([0], np.cumsum(stored)))[bin_offsets])
    if used.max() > capacity:
        raise ValueError(
            f"bin {int(used.argmax())} of the batch takes {int(used.max())} slots, above the capacity of "
            f"{capacity}: the capacity (and align_to) must be those the bins were planned with."
        )
