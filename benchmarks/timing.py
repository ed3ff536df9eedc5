"""Time functions: several runs of one, or several of them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def times(function: Callable[[], Any], runs: int = 5) -> list[float]:
    """Seconds of each run."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds


def in_turns(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round. They alternate, so that a slow moment of the machine meets them
    all."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name] += times(function, 1)
    return seconds


def over(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratio of each round."""
    return [a / b for a, b in zip(seconds, base, strict=True)]
