"""Which columns of a selection make the labels of a batch, and which may not be there.

One rule: a column that looks like labels, masks or the collator's own output is used for that or refused,
never passed on.
"""

from __future__ import annotations

import numpy as np
import torch

from multipack.data.columns import Columns, NumberColumn
from multipack.data.reading import Located, read
from multipack.data.targets import MASKS

_MADE_HERE = frozenset(
    {
        *("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens_real", "indices"),
        *("max_length_q", "max_length_k", "num_tokens", "num_sequences", "num_target_tokens", "num_segments"),
        *("num_slots", "num_bins", "bin_capacity", "sum_loss_weights"),
        *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "block_size"),
    }
)


def label_columns(columns: Columns) -> tuple[NumberColumn | None, tuple[str, ...]]:
    """The column labels are made of (None: a number a sequence) and the masks that choose among its
    tokens."""
    if "labels" in columns.scalars:
        return None, ()
    if "labels" in columns.tokens:
        return columns.tokens["labels"], ()
    return columns.tokens["input_ids"], tuple(name for name in MASKS if name in columns.tokens)


def wide(column: NumberColumn) -> torch.dtype:
    """Tokens and labels must be able to hold pad_token_id and ignore_index, which booleans cannot."""
    return torch.int64 if column.dtype == torch.bool else column.dtype


def check_columns(columns: Columns, located: Located) -> None:
    for name in ("labels", *MASKS, "attention_mask"):
        if name in columns.objects or (name in columns.scalars and name != "labels"):
            raise ValueError(
                f"column {name!r} has no number for each token, so it would choose no targets: make it a "
                "list of numbers as long as the tokens, or leave it out by TokenDataset(columns=...)"
            )
    for kind in (columns.tokens, columns.scalars, columns.objects):
        taken = _MADE_HERE.intersection(kind)
        if taken:
            raise ValueError(
                f"the collator makes {sorted(taken)} itself: leave these columns out by "
                "TokenDataset(columns=...)"
            )
    if "attention_mask" in columns.tokens:
        _check_unpadded(columns.tokens["attention_mask"], located)


def _check_unpadded(mask: NumberColumn, located: Located) -> None:
    values = read(mask, located)
    if bool((values > 1).any()):
        raise ValueError(
            f"attention_mask has values up to {int(values.max())}, which number sequences packed by someone "
            "else, and they would be read as one. Give their lengths in a column seq_lengths, or positions "
            "that begin again at 0 in position_ids."
        )
    attended = values != 0
    if not bool(attended.all()):
        first = int(torch.nonzero(~attended)[0])
        sequence = int(np.searchsorted(np.cumsum(located.lengths), first, side="right"))
        raise ValueError(
            f"attention_mask is 0 in sequence {sequence} of the batch (table row {located.rows[sequence]}): "
            "the row was padded before, and its padding would be trained on. Tokenise without padding."
        )
