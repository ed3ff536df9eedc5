"""The README's main job on this machine: how long it takes, and what it learns.

    python -m benchmarks.main_job

Two ranks fine-tune a tiny Llama with random weights on text of the installed Python, from the first import to the exported model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = "torchrun --nproc-per-node 2 -m multipack.train sft"


def run(folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the whole job, and its metrics, one entry a logged step."""
    began = time.perf_counter()
    subprocess.run(
        [*COMMAND.split(), "--output_dir", str(folder)],
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - began
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return seconds, [entry for entry in entries if "loss" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        seconds, steps = run(Path(folder))
    first, last = steps[0]["loss"], statistics.fmean(step["loss"] for step in steps[-20:])
    print(f"`OMP_NUM_THREADS=1 {COMMAND}`\n")
    print(
        "| whole job s | optimizer steps | loss of the first step | of the last 20 | it fell by |\n|---|---|---|---|---|"
    )
    print(f"| {seconds:.1f} | {len(steps)} | {first:.3f} | {last:.3f} | {1 - last / first:.1%} |")


if __name__ == "__main__":
    main()
