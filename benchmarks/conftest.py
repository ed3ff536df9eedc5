"""What pytest-benchmark measured becomes records: a table a group, a row an entry, its time and that over our
first entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.record import record

OURS: dict[str, float] = {}
"""Group -> median seconds of the first of our entries. Ours come first, so that rivals find it."""


@pytest.fixture(autouse=True)
def _recorded(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    benchmark: Any = getattr(request.node, "funcargs", {}).get("benchmark")
    if benchmark is None or benchmark.stats is None:
        return
    stats = benchmark.stats.stats
    name = str(benchmark.params["name"] if benchmark.params else benchmark.name.removeprefix("test_"))
    if name.startswith("multipack"):
        OURS.setdefault(benchmark.group, stats.median)
    record(benchmark.group, name, "time", [1e3 * seconds for seconds in stats.sorted_data], "ms")
    if benchmark.group in OURS:
        record(benchmark.group, name, "over ours", stats.median / OURS[benchmark.group], "x")
    for column, value in benchmark.extra_info.items():
        record(benchmark.group, name, column, value)
