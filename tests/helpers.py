"""What several test modules need."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared"
"""Texts, lengths and a tokenizer beside the checkout, for tests marked `shared`."""
