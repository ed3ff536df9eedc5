"""The jobs that the trainer runs without any data of the user's: how long they take, and what they learn.

    python -m benchmarks.main_job sft    # the README's first command: a tiny Llama on text of the installed Python
    python -m benchmarks.main_job ppo    # the built-in task of PPO, with three seeds

Two ranks, random weights, from the first import to the exported model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report.tables import markdown_table

LAUNCH = "torchrun --nproc-per-node 2 -m multipack.train"


def run(job: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the whole job, and its metrics, one entry a logged step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [*f"{LAUNCH} {job}".split(), "--output_dir", folder],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        seconds = time.perf_counter() - began
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return seconds, [json.loads(line) for line in lines]


def sft() -> None:
    seconds, metrics = run("sft")
    losses = [entry["loss"] for entry in metrics if "loss" in entry]
    first, last = losses[0], statistics.fmean(losses[-20:])
    print(f"`OMP_NUM_THREADS=1 {LAUNCH} sft`\n")
    columns = ["whole job s", "optimizer steps", "loss of the first step", "of the last 20", "it fell by"]
    row = [f"{seconds:.1f}", str(len(losses)), f"{first:.3f}", f"{last:.3f}", f"{1 - last / first:.1%}"]
    print(markdown_table(columns, [row]))


def ppo() -> None:
    rows = []
    for seed in range(3):
        seconds, metrics = run(f"ppo --seed {seed}")
        rewards = [entry["reward"] for entry in metrics if "reward" in entry]
        first, last = rewards[0], statistics.fmean(rewards[-10:])
        rows.append([str(seed), f"{seconds:.1f}", str(len(rewards)), f"{first:.3f}", f"{last:.3f}"])
    print(f"`OMP_NUM_THREADS=1 {LAUNCH} ppo --seed SEED`\n")
    columns = ["seed", "whole job s", "iterations", "reward of the first", "reward of the last 10"]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    {"sft": sft, "ppo": ppo}[sys.argv[1]]()
