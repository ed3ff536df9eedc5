"""Counts in words."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `2,000 rows`; `many` where it is not `one` with an s."""
    return f"1 {one}" if number == 1 else f"{number:,} {many or one + 's'}"
