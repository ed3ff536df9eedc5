"""Where the time of an iteration goes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class Phases:
    """Seconds of this rank by phase. Phases that end in a collective include the wait for the slowest
    rank."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        """Share of `name` in the time of all phases, 0..1; NaN before any time was counted."""
        return self.seconds[name] / self.total if self.total else float("nan")
