"""`attn_implementation="multipack"`: causal attention inside each packed sequence, and nowhere else.

A packed row holds sequences one after the other; their boundaries travel as `cu_seq_lens_q`. No mask of
tokens x tokens is ever built: on CPU every segment is one call of torch's fused attention, on CUDA torch's variable-length
kernel takes all of them at once. The rule: without boundaries there is an error, never attention across sequences.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION = "multipack"
"""The name to pass as `attn_implementation` once this module is imported."""


class Segments:
    """Boundaries of the packed sequences of one batch, read from the device at most once.

    All layers of a forward and all recomputations of a backward share one instance, so the loop over segments costs one
    device synchronisation a batch on CUDA and none on CPU; the variable-length kernel needs none at all.
    """

    def __init__(self, cu_seq_lens: Tensor) -> None:
        self._cu_seq_lens = cu_seq_lens
        self._lengths: list[int] | None = None

    def lengths(self) -> list[int]:
        """Token counts of the segments, in order, padding included."""
        if self._lengths is None:
            self._lengths = self._cu_seq_lens.diff().tolist()
        return self._lengths


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a transformers model for a flat or row batch of `PackedCollator`, or a padded one of `PaddedCollator`.

    Labels stay out: the loss is summed over tokens by `loss.py`, never averaged inside the model.
    """
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    if "cu_seq_lens_q" not in batch:
        return inputs | {"attention_mask": batch["attention_mask"]}
    for key in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        inputs[key] = batch[key]
    return inputs | {"segments": Segments(batch["cu_seq_lens_q"])}


def multipack_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    segments: Segments | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; transformers calls it.

    Args:
        query: [rows, heads, tokens, head_dim]; rows are read as one long row, so boundaries count over all of them.
        key, value: [rows, key_value_heads, tokens, head_dim]; fewer heads than `query` means grouped queries.
        sliding_window: a token sees itself and at most `sliding_window - 1` tokens before it.
        cu_seq_lens_q: int32 [segments + 1], from 0 to rows * tokens, strictly increasing.
        segments: the same boundaries, shared by all layers (`model_inputs` makes it).

    Returns:
        [rows, tokens, heads, head_dim] and None in the place of the attention weights.

    Raises:
        ValueError: boundaries are missing or do not cover the row, a mask or a key-value cache came with the batch, or the
            model asks for something this attention has not (soft capping, sinks, position biases, no causality).
    """
    if cu_seq_lens_q is None:
        raise ValueError(
            "attn_implementation='multipack' got no cu_seq_lens_q: without boundaries packed sequences would see each other. "
            "Call model(**model_inputs(batch)), or use stock_attention(model) for padded batches and generation."
        )
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ValueError(_NO_MASK_NO_CACHE)
    unknown = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    if asked := [name for name, argument in unknown.items() if argument is not None]:
        raise ValueError(
            f"{type(module).__name__} asks for {asked}, which multipack attention has not: use a stock one."
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} is not causal; multipack attention is for causal models only."
        )

    rows, heads, tokens, head_dim = query.shape
    if rows > 1:
        query, key, value = (states.transpose(0, 1).flatten(1, 2)[None] for states in (query, key, value))
    dtype = (
        torch.get_autocast_dtype(query.device.type)
        if torch.is_autocast_enabled(query.device.type)
        else value.dtype
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if _has_varlen_kernel(query, sliding_window):
        if dropout:
            raise ValueError(
                f"torch's variable-length attention has no dropout, got {dropout}: set attention_dropout=0."
            )
        assert max_length_q is not None
        output = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        lengths = (segments or Segments(cu_seq_lens_q)).lengths()
        output = _segment_loop(query, key, value, lengths, scaling, dropout, sliding_window)
    return output.view(rows, tokens, heads, head_dim), None


_NO_MASK_NO_CACHE = (
    "attn_implementation='multipack' takes boundaries (cu_seq_lens_q) and neither a mask nor a key-value cache, which could "
    "contradict them. Drop attention_mask and pass use_cache=False, or use stock_attention(model) for padded batches and generation."
)


def _segment_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """Fused causal attention of each segment, [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    if sum(lengths) != query.shape[2]:
        raise ValueError(
            f"cu_seq_lens_q ends at {sum(lengths)} but the batch has {query.shape[2]} tokens: the rest would attend to nothing. "
            "Boundaries must cover the padding as well, as PackedCollator's do."
        )
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(
        torch.split(query, lengths, 2),
        torch.split(key, lengths, 2),
        torch.split(value, lengths, 2),
        strict=True,
    ):
        band = _band(q.shape[2], sliding_window, q.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=band,
                is_causal=band is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2)


def _band(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Bool [length, length], true where a token may look; None where plain causality says it all."""
    if sliding_window is None or length <= sliding_window:
        return None
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return visible.triu_(1 - sliding_window)


def _has_varlen_kernel(query: Tensor, sliding_window: int | None) -> bool:
    """Whether torch's variable-length kernel takes this input: half precision on an Ampere GPU or newer."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability(query.device) < (8, 0) or query.shape[-1] > 256:
        return False
    parameters = _varlen_parameters()
    return "window_size" in parameters or ("is_causal" in parameters and sliding_window is None)


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Names that `varlen_attn` of the installed torch takes: they changed from release to release; none before 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """All segments in one kernel, [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = _varlen_parameters()
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    options: dict[str, Any] = {"scale": scaling} if "scale" in parameters else {}
    if not options and scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    if "window_size" in parameters:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    else:
        options["is_causal"] = True
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in parameters:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    boundaries = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    output = varlen_attn(query.contiguous(), key.contiguous(), value.contiguous(), *boundaries, **options)
    assert isinstance(output, Tensor)  # a pair only where asked for
    return output


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    if attention_mask is not None:
        raise ValueError(_NO_MASK_NO_CACHE)


AttentionInterface.register(ATTENTION, multipack_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


@contextlib.contextmanager
def stock_attention(model: Any, implementation: str = "sdpa") -> Iterator[None]:
    """Let a transformers model use padded batches and a key-value cache for a while, as generation needs."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
