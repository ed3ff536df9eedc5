"""Attention inside each segment of a packed row: a loop over segments, or one variable-length kernel for all.

The rule: correct before fast. Torch's fused attention where it computes what the model asks for; matrix
products of one segment at a time for soft caps, sinks and biases, which it does not know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.integrations.masks import VisibleTokens


class Segments:
    """Boundaries of the packed sequences of one batch, read from the device at most once.

    All layers of a forward and all recomputations of a backward share one instance, so the loop over segments
    costs one device synchronisation a batch on CUDA and none on CPU; the variable-length kernel needs none at
    all, except for chunks.
    """

    def __init__(self, cu_seq_lens: Tensor) -> None:
        self._cu_seq_lens = cu_seq_lens
        self._lengths: list[int] | None = None
        self._chunks: dict[int, tuple[list[int], Tensor]] = {}

    def lengths(self) -> list[int]:
        """Token counts of the segments, in order, padding included."""
        if self._lengths is None:
            self._lengths = self._cu_seq_lens.diff().tolist()
        return self._lengths

    def cut(self, chunk: int) -> tuple[list[int], Tensor]:
        """Segments cut at every `chunk` tokens of each: their lengths, and their boundaries as
        `cu_seq_lens`."""
        if chunk not in self._chunks:
            lengths = [
                min(chunk, length - start) for length in self.lengths() for start in range(0, length, chunk)
            ]
            boundaries = torch.tensor([0, *lengths]).cumsum(0)
            self._chunks[chunk] = lengths, boundaries.to(self._cu_seq_lens)
        return self._chunks[chunk]


@dataclass(frozen=True)
class Asked:
    """What a layer asks of its attention, beside its states."""

    visible: VisibleTokens
    scaling: float | None = None
    """Factor of the scores; None: 1 / sqrt(width of a key)."""
    dropout: float = 0.0
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap), before the mask."""
    sinks: Tensor | None = None
    """A logit that takes its share of the softmax and has no value, [heads] or [rows, heads, tokens, 1]."""
    bias: Tensor | None = None
    """Added to the scores, [1 or rows, 1 or heads, tokens, tokens]."""

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernels compute all that is asked for."""
        return self.softcap is None and self.sinks is None and self.bias is None


class _Segment(NamedTuple):
    row: int
    start: int
    """In its row."""
    length: int


def segment_loop(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], asked: Asked, *, tokens_per_row: int
) -> Tensor:
    """Causal attention of each segment, [1, heads, tokens, width] -> [1, tokens, heads, width of a value].

    Args:
        query, key, value: all rows of the batch one after the other; fewer key heads than query heads are
            shared by groups.
        lengths: of the segments; together all tokens. Segments of no token, as static shapes have, are passed
            over.
        asked: what else decides.
        tokens_per_row: where rows end; no segment crosses it.

    Raises:
        ValueError: the segments do not cover the tokens.
    """
    if sum(lengths) != query.shape[2]:
        raise ValueError(
            f"cu_seq_lens_q ends at {sum(lengths)} but the batch has {query.shape[2]} tokens: the rest would "
            "attend to nothing. Boundaries must cover the padding as well, as PackedCollator's do."
        )
    lengths = [length for length in lengths if length]
    attend = _fused if asked.fused else _by_products
    outputs = []
    for segment, q, k, v in zip(
        _segments(lengths, tokens_per_row),
        torch.split(query, lengths, 2),
        torch.split(key, lengths, 2),
        torch.split(value, lengths, 2),
        strict=True,
    ):
        outputs.append(attend(q, k, v, segment, asked))
    return torch.cat(outputs, 2).transpose(1, 2)


def _segments(lengths: list[int], tokens_per_row: int) -> Iterator[_Segment]:
    begin = 0
    for length in lengths:
        yield _Segment(begin // tokens_per_row, begin % tokens_per_row, length)
        begin += length


def _fused(query: Tensor, key: Tensor, value: Tensor, segment: _Segment, asked: Asked) -> Tensor:
    visible = asked.visible.within(*segment, query.device)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        is_causal=visible is None,
        dropout_p=asked.dropout,
        scale=asked.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _by_products(query: Tensor, key: Tensor, value: Tensor, segment: _Segment, asked: Asked) -> Tensor:
    """The same as a softmax over scores, in float32: memory grows by heads * length^2 of the longest
    segment."""
    length = segment.length
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if asked.softcap is not None:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    end = segment.start + length
    if asked.bias is not None:
        row = segment.row if asked.bias.shape[0] > 1 else 0
        scores = scores + asked.bias[row : row + 1, :, segment.start : end, segment.start : end]
    visible = asked.visible.within(*segment, query.device)
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
    if asked.sinks is not None:
        scores = torch.cat([scores, _sinks_of(asked.sinks.float(), segment)], -1)
    weights = F.softmax(scores, -1)[..., :length].to(value.dtype)
    return F.dropout(weights, asked.dropout) @ value


def _sinks_of(sinks: Tensor, segment: _Segment) -> Tensor:
    """[1, heads, length, 1]."""
    if sinks.ndim == 1:
        return sinks[None, :, None, None].expand(1, -1, segment.length, 1)
    return sinks[segment.row : segment.row + 1, :, segment.start : segment.start + segment.length]


def has_varlen_kernel(query: Tensor, value: Tensor, asked: Asked) -> bool:
    """Whether torch's variable-length kernel computes this: half precision on an Ampere GPU or newer, up to
    256 a head."""
    if not asked.fused or asked.visible.function is not None:
        return False
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability(query.device) < (8, 0) or max(query.shape[-1], value.shape[-1]) > 256:
        return False
    parameters = _varlen_parameters()
    return "window_size" in parameters or ("is_causal" in parameters and asked.visible.window is None)


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Names that `varlen_attn` of the installed torch takes: they changed from release to release; none
    before 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, max_length: int, asked: Asked
) -> Tensor:
    """All segments in one kernel, [1, heads, tokens, width] -> [tokens, heads, width of a value].

    The kernel takes one width for all three: narrower states are padded with zeros, which change no product.

    Raises:
        ValueError: dropout is asked for, which the kernel does not have.
    """
    from torch.nn.attention.varlen import varlen_attn

    if asked.dropout:
        raise ValueError(
            f"torch's variable-length attention has no dropout, got {asked.dropout}: set attention_dropout=0."
        )
    parameters = _varlen_parameters()
    scaling = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    value_width = value.shape[-1]
    if value_width != query.shape[-1]:
        width = max(query.shape[-1], value_width)
        query, key, value = (F.pad(states, (0, width - states.shape[-1])) for states in (query, key, value))
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    options: dict[str, Any] = {"scale": scaling} if "scale" in parameters else {}
    if not options:
        query = query * (scaling * query.shape[-1] ** 0.5)
    window = asked.visible.window
    if "window_size" in parameters:
        options["window_size"] = (-1 if window is None else window - 1, 0)
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
    return output[..., :value_width]
