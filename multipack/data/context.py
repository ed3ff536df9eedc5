"""Cut a packed batch into the slices of context-parallel ranks.

All ranks of a context-parallel group hold the same batch, and each trains on its slots of it. One rule: what
needs to see beyond a slice is done before the cut. So labels are shifted inside their sequences first, as the
target of a slice's last slot lies in another slice, and the boundaries of the whole batch stay with each
slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch

from multipack.arguments import check_choice, whole_number

Layout: TypeAlias = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous")


def context_slice(
    batch: Mapping[str, Any],
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout = "zigzag",
    ignore_index: int = -100,
) -> dict[str, Any]:
    """The part of a packed batch that one context-parallel rank trains on.

    "zigzag" cuts every segment into 2 * cp_size equal chunks, of which rank r holds chunks r and 2 * cp_size
    - 1 - r: with causal attention all ranks then have like work, which ring attention needs (the order of
    TransformerEngine's `thd_get_partitioned_indices`). Plan and collate with `align_to=2 * cp_size`.
    "contiguous" cuts every row of the batch into cp_size equal runs, for Ulysses, sequence parallelism and
    attention with gathered keys; the slots of a row must be a multiple of cp_size.

    Sequences of 5 and 3 tokens, cp_size 2, align_to 4 ("zigzag" keeps slots 0 1 6 7 | 8 11 on rank 0):
    ```
    slot               0   1   2   3   4   5   6   7   8   9  10  11
    input_ids         11  12  13  14  15   0   0   0  21  22  23   0
    zigzag, rank       0   0   1   1   1   1   0   0   0   1   1   0     cu_seq_lens_q 0 4 6 on both
    contiguous, rank   0   0   0   0   0   0   1   1   1   1   1   1     cu_seq_lens_q 0 6, and 0 2 6
    ```

    Args:
        batch: a batch of PackedCollator with labels for tokens, the same on all ranks of the group, on any
            device. Zigzag reads its boundaries on the CPU.
        cp_rank, cp_size: this rank of the group, and its size.
        ignore_index: label of slots that are no target, as the collator had it.

    Returns:
        A dict of
        - `input_ids`, `position_ids`, `seq_idx` and all other tensors of that shape, [rows, slots / cp_size];
          the slices of all ranks are a partition of the batch.
        - `shift_labels`: the label of the next slot of the same segment, `ignore_index` in its last: logits
          and `shift_labels` of a slot belong together. `labels` is left out, since a model would shift it
          inside the slice.
        - `cu_seq_lens_q` and `cu_seq_lens_k`, int32: boundaries of the segments inside the slice, from 0, and
          their longest length or more in the ints `max_length_q` and `max_length_k`. Of a static batch their
          number and the int are the same in every slice of every batch, with empty segments; else they are
          strictly increasing.
        - `global_cu_seq_lens` and `global_max_length`: those of the batch.
        - `num_target_tokens`: targets of the slice, whose sum over the ranks is that of the batch; the ints
          `num_tokens` and `num_sequences`, and all else, as in the batch.

    Raises:
        ValueError: a segment or row is no multiple of what its layout needs, a first label is a target, which
            is no slot's next, or the batch was not packed, is a slice already, or has a label a sequence.
    """
    check_choice("layout", layout, LAYOUTS)
    cp_size = whole_number("cp_size", cp_size, 1)
    if not 0 <= whole_number("cp_rank", cp_rank) < cp_size:
        raise ValueError(
            f"cp_rank {cp_rank} is outside 0..{cp_size - 1} of {cp_size} context-parallel ranks."
        )
    _check_batch(batch)
    rows, slots = batch["input_ids"].shape
    boundaries = batch["cu_seq_lens_q"]
    if layout == "zigzag":
        picked = _zigzag(boundaries, cp_rank, cp_size)
        local = boundaries // cp_size
    else:
        picked = _contiguous(batch["input_ids"], cp_rank, cp_size)
        local = _contiguous_boundaries(boundaries, slots, cp_rank, cp_size)
    shifted = shift_labels(batch["labels"], boundaries, ignore_index)
    part: dict[str, Any] = {
        name: value.flatten()[picked].view(rows, slots // cp_size)
        for name, value in ({**batch, "shift_labels": shifted}).items()
        if isinstance(value, torch.Tensor) and value.shape == batch["input_ids"].shape and name != "labels"
    }
    part |= {name: value for name, value in batch.items() if name not in part and name not in _OF_WHOLE_BATCH}
    is_static = "num_segments" in batch
    part["cu_seq_lens_q"] = part["cu_seq_lens_k"] = local if is_static else torch.unique_consecutive(local)
    longest = batch["max_length_q"]
    part["max_length_q"] = part["max_length_k"] = (
        -(-longest // cp_size) if layout == "zigzag" else min(longest, slots // cp_size)
    )
    part["global_cu_seq_lens"] = boundaries
    part["global_max_length"] = longest
    part["num_target_tokens"] = int((part["shift_labels"] != ignore_index).sum())
    return part


def shift_labels(labels: torch.Tensor, boundaries: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Labels moved one slot to the left inside each segment, so that each slot has the token it is to
    predict.

    Args:
        labels: [rows, slots], unshifted.
        boundaries: of the segments, counted through all rows, non-decreasing from 0 to rows * slots.

    Returns:
        [rows, slots]; the last slot of each segment has `ignore_index`.

    Raises:
        ValueError: the first slot of a segment has a label: no slot of its segment predicts it, and it would
            be lost.
    """
    flat = labels.flatten()
    first = boundaries[:-1][boundaries.diff() > 0].long()
    targets = flat[first] != ignore_index
    if bool(targets.any()):
        raise ValueError(
            f"the label of slot {int(first[targets][0])}, the first of its sequence, is a target, but no "
            "slot of the sequence predicts it. Collate with mask_first_label=True, which is the default."
        )
    # The first label of the next segment, which moves into the last slot of this one, is ignored already.
    return torch.cat((flat[1:], flat.new_full((1,), ignore_index))).view_as(labels)


_OF_WHOLE_BATCH = (
    "labels",
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "block_size",
)
"""What a slice must not have: unshifted labels, and the block mask of all slots."""


def _check_batch(batch: Mapping[str, Any]) -> None:
    if "shift_labels" in batch:
        raise ValueError("the batch is a slice already: cut each batch once, by the size of the whole group.")
    if "cu_seq_lens_q" not in batch:
        raise ValueError(
            "the batch has no cu_seq_lens_q, so its sequences are not known: make it with PackedCollator, "
            "not with padding."
        )
    if "loss_weights" in batch:
        raise ValueError(
            "the batch has loss_weights, which slices do not carry: their targets would be weighed alike. "
            "Collate without them for context parallelism."
        )
    if batch["labels"].shape != batch["input_ids"].shape:
        raise ValueError(
            f"labels of shape {tuple(batch['labels'].shape)} are one a sequence, and a sequence lies in "
            "several slices: context parallelism needs a label for each token."
        )


def _zigzag(boundaries: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Slots of this rank, ascending, int64."""
    chunks = 2 * cp_size
    lengths = boundaries.diff().long()
    if bool((lengths % chunks != 0).any()):
        segment = int((lengths % chunks != 0).nonzero()[0])
        raise ValueError(
            f"segment {segment} of the batch has {int(lengths[segment])} slots, no multiple of 2 * cp_size = "
            f"{chunks}, so its ranks would have unequal parts. Plan and collate with align_to={chunks} and a "
            f"capacity that is a multiple of {chunks}."
        )
    starts = boundaries[:-1].long().repeat_interleave(lengths)
    size = (lengths // chunks).repeat_interleave(lengths)
    chunk = (torch.arange(len(starts), device=starts.device) - starts) // size
    return ((chunk == cp_rank) | (chunk == chunks - 1 - cp_rank)).nonzero()[:, 0]


def _contiguous(input_ids: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    rows, slots = input_ids.shape
    if slots % cp_size:
        raise ValueError(
            f"a row of the batch has {slots} slots, no multiple of cp_size = {cp_size}: collate with "
            f"pad_to={cp_size}, or with pad_to='capacity' or layout='rows' and a capacity that is a multiple "
            f"of {cp_size}."
        )
    part = slots // cp_size
    slot_of = torch.arange(rows * slots, device=input_ids.device).view(rows, slots)
    return slot_of[:, cp_rank * part : (cp_rank + 1) * part].flatten()


def _contiguous_boundaries(boundaries: torch.Tensor, slots: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    part = slots // cp_size
    row, column = boundaries // slots, boundaries % slots
    return row * part + (column - cp_rank * part).clamp(0, part)
