"""Ending what another thread waits in.

The one rule: a generator that runs cannot be closed from outside, so what it reads is closed below it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Closable(Iterator[T]):
    """Items, and the iterator that they are read from: `close` wakes a thread that waits in that one, where
    its own `close` can.

    Args:
        items: what is iterated, mostly a generator.
        below: gives the iterator to close first; None where there is nothing to close.
    """

    def __init__(self, items: Iterator[T], below: Callable[[], Any]) -> None:
        self._items = items
        self._below = below

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """Close what is read, then the items. May be called twice, and from any thread."""
        close(self._below())
        close(self._items)


def close(iterator: Any) -> None:
    """Close an iterator that has `close`, unless it is a generator that runs now."""
    method = getattr(iterator, "close", None)
    if not callable(method) or getattr(iterator, "gi_running", False):
        return
    with contextlib.suppress(ValueError) if hasattr(iterator, "gi_running") else contextlib.nullcontext():
        method()  # a generator may have begun to run since, which is this ValueError
