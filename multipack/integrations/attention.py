"""`attn_implementation="multipack"`: causal attention inside each packed sequence, and nowhere else.

A packed row holds sequences one after the other; their boundaries travel as `cu_seq_lens_q`. No mask of
tokens x tokens is ever built: on CPU every segment is one call of torch's fused attention, on CUDA torch's
variable-length kernel takes all of them at once. The rule: without boundaries there is an error, never
attention across sequences; an argument of a layer is applied or refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from multipack.integrations.masks import MaskFunction, VisibleTokens, visible_tokens
from multipack.integrations.segment_attention import Asked, Segments, has_varlen_kernel, segment_loop, varlen

ATTENTION = "multipack"
"""The name to pass as `attn_implementation` once this module is imported."""


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a transformers model for a flat or row batch of `PackedCollator`, or a padded one of
    `PaddedCollator`.

    Boundaries go as `cu_seq_lens_q` and as `seq_idx`, which attention and the kernels of recurrent layers,
    respectively, look for. Labels stay out: the loss is summed over tokens by `loss.py`, never averaged
    inside the model.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    if "cu_seq_lens_q" not in batch:
        if "position_ids" in batch:
            inputs["position_ids"] = batch["position_ids"]
        return inputs | {"attention_mask": batch["attention_mask"]}
    for key in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        inputs[key] = batch[key]
    if "seq_idx" in batch:
        inputs["seq_idx"] = batch["seq_idx"]
    return inputs | {"segments": Segments(batch["cu_seq_lens_q"])}


def multipack_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleTokens | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    segments: Segments | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; transformers calls it.

    Args:
        query: [rows, heads, tokens, head_dim]; rows are read as one long row, so boundaries count over all of
            them.
        key, value: [rows, key_value_heads, tokens, head_dim]; fewer heads than `query` means grouped queries,
            and the heads of `value` may have another width.
        attention_mask: what transformers made of the model's mask by `VisibleTokens`; None: plain causality.
        sliding_window: a token sees itself and at most `sliding_window - 1` tokens before it; read where no
            mask came, since a mask of the model says it as well.
        is_causal: False is refused where no mask came; None: the layer's own `is_causal`.
        cu_seq_lens_q: int32 [segments + 1], from 0 to rows * tokens, not decreasing.
        segments: the same boundaries, shared by all layers (`model_inputs` makes it).
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.
        s_aux, sinks: a logit without a value, [heads] as in gpt-oss, or [rows, heads, tokens, 1].
        position_bias: added to the scores, [1 or rows, 1 or heads, tokens, tokens].
        others: refused, unless None or names of `transformers.utils.TransformersKwargs` that attention does
            not read.

    Returns:
        [rows, tokens, heads, width of a value] and None in the place of the attention weights.

    Raises:
        ValueError: boundaries are missing or do not cover the row, a mask or a key-value cache came with the
            batch, or the layer asks for something this attention does not have.
    """
    if cu_seq_lens_q is None:
        raise ValueError(
            "attn_implementation='multipack' got no cu_seq_lens_q: without boundaries packed sequences "
            "would see each other. Call model(**model_inputs(batch)), or use stock_attention(model) for "
            "padded batches and generation."
        )
    if isinstance(attention_mask, Tensor) or key.shape[2] != query.shape[2]:
        raise ValueError(_NO_MASK_NO_CACHE)
    if asked_for := [
        name for name, argument in others.items() if argument is not None and name not in _NOT_FOR_ATTENTION
    ]:
        raise ValueError(
            f"{type(module).__name__} asks for {asked_for}, which multipack attention does not have: use a "
            "stock one."
        )
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise ValueError(
                f"{type(module).__name__} is not causal; multipack attention is for causal models only."
            )
        attention_mask = VisibleTokens(window=sliding_window)
    if s_aux is not None and sinks is not None:
        raise ValueError(f"{type(module).__name__} gives both s_aux and sinks, two names of one thing.")
    asked = Asked(
        attention_mask,
        scaling,
        dropout,
        softcap,
        sinks if s_aux is None else s_aux,
        position_bias,
    )
    return _attend(
        query, key, value, asked, segments or Segments(cu_seq_lens_q), cu_seq_lens_q, max_length_q
    ), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Asked,
    segments: Segments,
    cu_seq_lens: Tensor,
    max_length: int | None,
) -> Tensor:
    rows, heads, tokens, _ = query.shape
    if rows > 1:
        query, key, value = (states.transpose(0, 1).flatten(1, 2)[None] for states in (query, key, value))
    dtype = (
        torch.get_autocast_dtype(query.device.type)
        if torch.is_autocast_enabled(query.device.type)
        else value.dtype
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    chunk = asked.visible.chunk
    if has_varlen_kernel(query, value, asked):
        assert max_length is not None
        if chunk is not None and chunk < max_length:
            cu_seq_lens, max_length = segments.cut(chunk)[1], chunk
        output = varlen(query, key, value, cu_seq_lens, max_length, asked)
    else:
        lengths = segments.lengths() if chunk is None else segments.cut(chunk)[0]
        output = segment_loop(query, key, value, lengths, asked, tokens_per_row=tokens)
    return output.reshape(rows, tokens, heads, value.shape[-1]).contiguous()  # models take views of it


_NO_MASK_NO_CACHE = (
    "attn_implementation='multipack' takes boundaries (cu_seq_lens_q) and neither a mask nor a key-value "
    "cache, which could contradict them. Drop attention_mask and pass use_cache=False, or use "
    "stock_attention(model) for padded batches and generation."
)

_NOT_FOR_ATTENTION = frozenset(
    {
        *(
            "cu_seq_lens_k",
            "max_length_k",
            "seq_idx",
            "position_ids",
            "num_items_in_batch",
            "use_cache",
            "cache_position",
        ),
        *(
            "output_hidden_states",
            "output_attentions",
            "output_router_logits",
            "return_dict",
            "position_embeddings",
        ),
    }
)
"""What transformers hands down to every layer, for others to read; positions are in the states already."""


def _mask_of(
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> VisibleTokens:
    """Called by transformers where a model makes a mask; sizes, offsets and dtypes of a tensor say nothing
    more here."""
    if attention_mask is not None or q_length != kv_length:
        raise ValueError(_NO_MASK_NO_CACHE)
    return visible_tokens(mask_function)


AttentionInterface.register(ATTENTION, multipack_attention)
AttentionMaskInterface.register(ATTENTION, _mask_of)


@contextlib.contextmanager
def stock_attention(model: Any, implementation: str = "sdpa") -> Iterator[None]:
    """Let a transformers model use padded batches and a key-value cache for a while, as generation needs."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
