"""The throughput benchmark runs and its records say what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from train.ranks import environment

ROOT = Path(__file__).parents[2]


def measured(records: Path, *arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.throughput", *arguments],
        cwd=ROOT,
        env=environment() | {"MULTIPACK_RECORDS": str(records)},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {line["name"]: line["value"] for line in map(json.loads, records.read_text().splitlines())}


def test_every_loader_has_its_records_and_padding_is_seen(tmp_path: Path):
    found = measured(
        tmp_path / "records", "--simulate-step", "1", "--engines", "1 rank", "--steps", "3", "--rounds", "1"
    )
    rows = {name.split(" | ")[1] for name in found}
    assert rows == {f"1 rank, {loader}" for loader in ("padded", "trl packed", "trl packed +2", "multipack")}
    table = "samples a second, step simulated by 1 ms of sleep | 1 rank,"
    assert found[f"{table} padded | multipack over it, by samples/s"] > 2
    assert found[f"{table} padded | multipack over it, by tokens/s"] > 2
    assert 0 <= found[f"{table} padded | wait"] <= 100
    assert 60 < found[f"{table} padded | padding"] < 95
    assert found[f"{table} multipack | multipack over it, by samples/s"] == 1
    assert found[f"{table} multipack | padding"] == 0
    assert not any(name.endswith("| gpu busy") for name in found)
