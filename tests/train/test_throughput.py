"""The throughput benchmark runs and its table says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from train.ranks import environment

ROOT = Path(__file__).parents[2]


def table(*arguments: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.throughput", *arguments],
        cwd=ROOT, env=environment(), check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("| 1 rank")]
    return {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows}


def test_every_loader_has_a_line_and_padding_is_seen():
    rows = table("--simulate-step", "1", "--engines", "1 rank", "--steps", "3", "--rounds", "1")
    assert list(rows) == ["padded", "trl packed", "trl packed +2", "multipack"]
    by_samples, by_tokens, _, _, wait, padding, busy = rows["padded"]
    assert float(by_samples.strip("*x")) > 2
    assert float(by_tokens.strip("*x")) > 2
    assert 0 <= float(wait.strip("%")) <= 100
    assert 60 < float(padding.strip("%")) < 95
    assert busy == "-"
    assert rows["multipack"][0] == "**1.00x**"
    assert float(rows["multipack"][5].strip("%")) == 0
