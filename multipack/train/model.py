"""The model of a run: loaded by name or made small and random, packed attention, adapters."""

from __future__ import annotations

from typing import Any


def recompute_activations(model: Any) -> None:
    """Keep the inputs of each block only and compute the rest again in the backward pass."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # transformers before 5.20 spells it so
        model.gradient_checkpointing_enable(options)
