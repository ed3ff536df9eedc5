"""What a token may see of its own sequence, read from the mask functions of transformers.

A model describes its masks as functions of (batch, head, query, key), which transformers hands to the
registered attention. The rule: a description that is known (causal, sliding window, chunks) becomes numbers
and costs no memory; any other is evaluated, sequence by sequence; none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Any]
"""(batch, head, query, key), index tensors that broadcast, to a bool tensor: whether the query sees the
key."""


@dataclass(frozen=True, eq=False)
class VisibleTokens:
    """Stands in the place of a mask tensor; an attention that computes with it itself is told that it cannot.

    >>> VisibleTokens(window=2).within(0, 0, 4, torch.device("cpu")).int()[0, 0]
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    window: int | None = None
    """A token sees itself and at most `window - 1` tokens before it; None: all tokens before it."""
    chunk: int | None = None
    """A token sees no further back than the start of its chunk of so many tokens, counted from the start of
    its sequence."""
    function: MaskFunction | None = None
    """Any other description, which alone decides; in it tokens are counted from the start of a row."""

    def within(self, row: int, start: int, length: int, device: torch.device) -> Tensor | None:
        """What the tokens of one sequence see of each other; None where plain causality says it all.

        Args:
            row: of the batch, in which the sequence lies.
            start: of the sequence in its row.
            length: of the sequence. Chunks are not applied here: `Segments` cuts sequences at them.

        Returns:
            bool [1 or heads, 1, length, length] or None.
        """
        if self.function is not None:
            index = torch.arange(start, start + length, device=device)
            zero = torch.zeros((), dtype=torch.int64, device=device)
            visible = self.function(zero + row, zero, index[:, None], index[None, :])
            return torch.as_tensor(visible, device=device).expand(length, length)[None, None]
        if self.window is None or length <= self.window:
            return None
        visible = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        return visible.triu_(1 - self.window)[None, None]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotATensorError(_OWN_ATTENTION)

    def __getitem__(self, _: Any) -> NoReturn:
        raise NotATensorError(_OWN_ATTENTION)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotATensorError(f"mask.{name}: {_OWN_ATTENTION}")


class NotATensorError(AttributeError, ValueError):
    """A model took `VisibleTokens` for a mask tensor; an AttributeError as well, since models look by
    `hasattr`."""


_OWN_ATTENTION = (
    "the model computes with its attention mask in code of its own, which knows nothing of packed "
    "sequences, so they would see each other. Use a model whose attention goes through transformers' "
    "AttentionInterface alone, or train it on padded batches (PaddedCollator) with a stock attention."
)


def visible_tokens(mask_function: MaskFunction) -> VisibleTokens:
    """Read a mask function of `transformers.masking_utils`; sequences of a packed row are kept apart by
    boundaries, not by it.

    Masks that are an intersection of causality, windows, chunks and the split of packed rows become numbers.
    The parts are recognised by the closures that transformers makes; what is not recognised is kept whole, to
    be evaluated.
    """
    parts = list(_parts(mask_function))
    windows = [value for kind, value in parts if kind == "window"]
    chunks = [value for kind, value in parts if kind == "chunk"]
    causal = any(kind == "causal" for kind, _ in parts)
    unknown = any(kind == "unknown" for kind, _ in parts)
    if unknown or not causal or len(chunks) > 1 or (windows and chunks):
        return VisibleTokens(function=mask_function)
    return VisibleTokens(window=min(windows) if windows else None, chunk=chunks[0] if chunks else None)


def _parts(function: MaskFunction) -> Iterator[tuple[str, Any]]:
    """The functions whose intersection `function` is, as (kind, number)."""
    if function is masking_utils.causal_mask_function:
        yield "causal", None
        return
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", "") != masking_utils.__name__ or "<locals>" not in name:
        yield "unknown", None
        return
    maker, values = name.split(".")[0], _closure(function)
    if maker == "and_masks" and "mask_functions" in values:
        for part in values["mask_functions"]:
            yield from _parts(part)
    elif maker == "remap_positions_for_packed_sequence" and "mask_function" in values:
        yield from _parts(values["mask_function"])
    elif maker == "packed_sequence_mask_function":
        return
    elif maker == "sliding_window_overlay" and isinstance(values.get("sliding_window"), int):
        yield "window", values["sliding_window"]
    elif maker == "chunked_overlay" and isinstance(values.get("chunk_size"), int):
        # Left padding is 0: a padding mask is refused before.
        yield "chunk", values["chunk_size"]
    else:
        yield "unknown", None


def _closure(function: MaskFunction) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names: tuple[str, ...] = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
