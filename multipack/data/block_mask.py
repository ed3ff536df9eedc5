"""FlexAttention's block mask of a packed batch, from boundaries instead of from tokens x tokens.

`create_block_mask` evaluates the mask at every pair of tokens, which takes longer than attention itself.
Segments are contiguous, so the blocks that a block of queries sees are one range, and those it sees as a
whole are another: both follow from where segments begin. The collator writes them in the loader's thread, as
tensors that travel with the batch, and `block_mask` wraps them on the device.

Causal, capacity 8, blocks of 2, sequences of 3 and 5 tokens (F: the whole block is visible, p: a part of it):
```
           keys  0 1  2 3  4 5  6 7
queries 0 1      p
        2 3      p    p
        4 5           p    p
        6 7           p    F    p
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from multipack.arguments import whole_number

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
"""Names of the tables in a batch, which are those of `BlockMask.from_kv_blocks`."""


def block_mask(batch: Mapping[str, Any], block: int = 128) -> BlockMask:
    """The mask of causal attention inside each segment, for `flex_attention(query, key, value,
    block_mask=...)`.

    Padding is a segment of its own, as in the boundaries. All layers of a forward share one mask.

    Args:
        batch: a batch of PackedCollator, on any device. Where the collator was made with `block_mask=block`,
            its tables are wrapped; otherwise they are made here, which waits for the boundaries if these are
            not on the CPU.
        block: side of a block in tokens; queries of shape [rows, heads, slots, head_dim] have ceil(slots /
            block).

    Returns:
        A BlockMask of shape [rows, 1, slots, slots] on the device of `input_ids`.

    Raises:
        ValueError: the batch has no boundaries, or its tables are of another block.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if "cu_seq_lens_q" not in batch:
        raise ValueError(
            "the batch has no cu_seq_lens_q, so its sequences are not known: make it with PackedCollator."
        )
    rows, slots = batch["input_ids"].shape
    device = batch["input_ids"].device
    if TABLES[0] in batch:
        if batch["block_size"] != block:
            raise ValueError(
                f"the batch has tables of blocks of {batch['block_size']} tokens, not of {block}: make the "
                f"collator with block_mask={block}, or pass block={batch['block_size']}."
            )
        tables = batch
    else:
        made = block_tables(batch["cu_seq_lens_q"].cpu().numpy(), rows, slots, block)
        tables = {name: table.to(device, non_blocking=True) for name, table in made.items()}
    segment: torch.Tensor = batch["seq_idx"]

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q >= kv) & (segment[b, q] == segment[b, kv])

    return BlockMask.from_kv_blocks(
        **{name: tables[name] for name in TABLES},
        BLOCK_SIZE=block,
        mask_mod=visible,
        seq_lengths=(slots, slots),
    )


def block_tables(
    boundaries: npt.NDArray[np.int32], rows: int, slots: int, block: int
) -> dict[str, torch.Tensor]:
    """The four tables of `BlockMask.from_kv_blocks`.

    Args:
        boundaries: of segments, counted through all rows, non-decreasing, with one at the end of each row.
        rows, slots: shape of the batch.
        block: side of a block in tokens.

    Returns:
        `kv_num_blocks` int32 [rows, 1, blocks] and `kv_indices` int32 [rows, 1, blocks, blocks]: the blocks
        of keys that each block of queries sees in part; `full_kv_num_blocks` and `full_kv_indices`: those
        that it sees as a whole. Entries of the indices behind their number are 0.
    """
    whole_number("block", block, 2)
    num_blocks = -(-slots // block)
    query = np.arange(num_blocks, dtype=np.int32)
    row_start = np.arange(rows)[:, None] * slots
    last_slot = np.minimum((query + 1) * block, slots) - 1
    starts = boundaries.astype(np.int64)

    def segment_start(slot: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Where the segment of each slot begins, int32 [rows, blocks], counted in its row."""
        found: npt.NDArray[np.int64] = starts[np.searchsorted(starts, row_start + slot, side="right") - 1]
        return (found - row_start).astype(np.int32)

    of_first, of_last = segment_start(query * block), segment_start(last_slot)
    # Queries j see a part of the blocks from `seen` on, and all of those from `whole` on, which lie in the
    # one segment that fills block j. Block j itself is never whole: its first token does not see its last.
    seen = of_first // block
    whole = np.where(of_first == of_last, -(-of_last // block), query)
    if slots % block:  # the last block has slots outside the batch
        whole[:, -1] = num_blocks - 1
    partial = seen[..., None] + query
    np.put_along_axis(partial, (whole - seen)[..., None], query[:, None], -1)
    return {
        "kv_num_blocks": _table(whole - seen + 1),
        "kv_indices": _table(np.where(query <= (whole - seen)[..., None], partial, 0)),
        "full_kv_num_blocks": _table(query - whole),
        "full_kv_indices": _table(np.where(query < (query - whole)[..., None], whole[..., None] + query, 0)),
    }


def _table(values: npt.NDArray[np.int32]) -> torch.Tensor:
    """With a dimension for heads, over which the mask is the same."""
    return torch.from_numpy(values[:, None])
