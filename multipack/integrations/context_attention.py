"""`attn_implementation="multipack_context"`: causal attention of packed sequences that are cut over
context-parallel ranks.

Each rank holds a contiguous slice of the slots (`context_slice(layout="contiguous")`). In every layer the
keys and values of all slices are gathered, queries stay where they are, and gradients of keys and values go
back to their ranks summed. The one rule: a slice ends where it ends, so only its first segment has keys
before its first query. The keys that a slice needs are thus one run of slots, from where that segment begins
to the slice's last slot, and attention is causal from the lower right: the last query of a segment sees all
keys of it that were kept.

Gathering costs every rank the keys and values of the whole batch for the time of a layer, as Llama 3 was
trained (arXiv 2407.21783, section 3.3.2); their heads are few in models with grouped queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

try:
    from torch.distributed._functional_collectives import all_gather_single_autograd as all_gather
except ImportError:  # its name before torch 2.13
    from torch.distributed._functional_collectives import all_gather_tensor_autograd as all_gather

CONTEXT_ATTENTION = "multipack_context"
"""The name to pass as `attn_implementation` once this module is imported."""


class ContextSegments:
    """The segments of one slice, and the ranks that hold the others; all layers of a forward share one
    instance.

    Args:
        part: a slice of `context_slice(batch, rank, size, layout="contiguous")` of a flat batch, where rank
            and size are this process's of `group`.
        group: the context-parallel ranks, in the order of their slices.

    Raises:
        ValueError: the slice is no contiguous one of a flat batch, or of another rank or size.
    """

    def __init__(self, part: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        rows, slots = part["input_ids"].shape
        boundaries = _boundaries(part)
        first, last = rank * slots, (rank + 1) * slots
        inside = [first, *(b for b in boundaries if first < b < last), last]
        local = [b - first for b in inside]
        if rows != 1 or boundaries[-1] != size * slots or local != _distinct(part["cu_seq_lens_q"].tolist()):
            raise ValueError(
                f"rank {rank} of {size} has {rows} rows of {slots} slots with boundaries {local[:4]}..., "
                f"which is no contiguous slice {rank} of a flat batch of {boundaries[-1]} slots: make it by "
                f"context_slice(batch, {rank}, {size}, layout='contiguous')."
            )
        begin = max(b for b in boundaries if b <= first)
        self.keys = slice(begin, last)
        """Slots whose keys some query of the slice sees."""
        self.query_lengths = [b - a for a, b in pairwise(inside)]
        """Tokens of each segment in the slice."""
        self.key_lengths = [last_key - first_key for first_key, last_key in pairwise([begin, *inside[1:]])]
        """Tokens of each segment up to the end of the slice; more than queries only in the first."""


def context_inputs(part: Mapping[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Arguments of a transformers model for a slice of `context_slice`; `shift_labels` stays out, the loss is
    of `loss.py` or yours."""
    return {
        "input_ids": part["input_ids"],
        "position_ids": part["position_ids"],
        "context_segments": ContextSegments(part, group),
        "use_cache": False,
    }


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    context_segments: ContextSegments | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; transformers calls it on every rank of the group.

    Args:
        query: [1, heads, slots, head_dim] of this rank's slice.
        key, value: [1, key_value_heads, slots, head_dim] of the slice; fewer heads than `query` means grouped
            queries.
        sliding_window: a token sees itself and at most `sliding_window - 1` tokens before it.
        context_segments: `context_inputs` makes it.

    Returns:
        [1, slots, heads, head_dim] and None in the place of the attention weights.

    Raises:
        ValueError: segments are missing, a mask or a key-value cache came with the batch, or the model asks
            for something this attention does not support (soft capping, sinks, position biases, no
            causality).
    """
    if context_segments is None:
        raise ValueError(
            "attn_implementation='multipack_context' got no context_segments: the slices of other ranks "
            "would not be seen. Call model(**context_inputs(context_slice(batch, rank, size, "
            "layout='contiguous'), group))."
        )
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ValueError(_NO_MASK_NO_CACHE)
    unknown = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    if asked := [name for name, argument in unknown.items() if argument is not None]:
        raise ValueError(
            f"{type(module).__name__} asks for {asked}, which attention over slices does not support."
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal; attention over slices is.")
    segments = context_segments
    keys = _gather(key, segments.group)[:, :, segments.keys]
    values = _gather(value, segments.group)[:, :, segments.keys]
    outputs = [
        F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=(mask := _visible(q.shape[2], k.shape[2], sliding_window, q.device)),
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for q, k, v in zip(
            torch.split(query, segments.query_lengths, 2),
            torch.split(keys, segments.key_lengths, 2),
            torch.split(values, segments.key_lengths, 2),
            strict=True,
        )
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


_NO_MASK_NO_CACHE = (
    "attn_implementation='multipack_context' takes segments and neither a mask nor a key-value cache, which "
    "could contradict them. Drop attention_mask and pass use_cache=False."
)


def _gather(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, heads, slots, head_dim] of each rank -> [1, heads, ranks * slots, head_dim], with gradients summed
    over ranks."""
    slots_first = states[0].transpose(0, 1).contiguous()
    gathered: Tensor = all_gather(slots_first, 0, group)
    return gathered.transpose(0, 1)[None]


def _visible(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Bool [queries, keys], true where a query may look, the last one at the last key; None where plain
    causality says it all."""
    if queries == keys and (sliding_window is None or keys <= sliding_window):
        return None
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return visible if sliding_window is None else visible.triu_(keys - queries + 1 - sliding_window)


def _boundaries(part: Mapping[str, Any]) -> list[int]:
    if "global_cu_seq_lens" not in part:
        raise ValueError(
            "the batch has no global_cu_seq_lens: cut it by context_slice(layout='contiguous') first."
        )
    return _distinct(part["global_cu_seq_lens"].tolist())


def _distinct(boundaries: list[int]) -> list[int]:
    """Without the empty segments of static batches."""
    return sorted(set(boundaries))


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    if attention_mask is not None:
        raise ValueError(_NO_MASK_NO_CACHE)


AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
AttentionMaskInterface.register(CONTEXT_ATTENTION, _no_mask)
