"""What one call of the throughput benchmarks measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one call measures."""

    engines: list[str] = field(default_factory=list)
    loaders: list[str] = field(default_factory=list)
    num_rows: int = 20_000
    sequence_len: int = 1024
    micro_batch_size: int = 2
    padded_rows: int = 20
    """Rows of a padded batch."""
    steps: int = 10
    rounds: int = 3
    simulate_step_ms: float | None = None
    """Instead of a model, a sleep: this long for a full batch of micro_batch_size * sequence_len slots, in
    proportion for others."""
    model: dict[str, Any] = field(default_factory=dict)
    """Shape of the Llama."""
    optimizer: str = "adamw_torch"
    bf16: bool = False
    recompute: bool = False
