"""The jobs that the trainer runs without any data of the user's: how long they take, and what they learn.

    python -m benchmarks.main_job sft    # the README's first command: a tiny Llama on text of the installed
    Python python -m benchmarks.main_job ppo    # the built-in task of PPO, with three seeds

Two ranks, random weights, from the first import to the exported model.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import record
from benchmarks.timing import times

LAUNCH = "torchrun --nproc-per-node 2 -m multipack.train"


def start_seconds() -> float:
    """What two ranks take that only import the trainer: the machine's disk and interpreter, which every job
    pays."""
    command = [*LAUNCH.split()[:3], "-m", "benchmarks.main_job", "import"]
    return times(lambda: subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}), 1)[0]


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


def import_trainer() -> None:
    importlib.import_module("multipack.train.sft")


def sft() -> None:
    table = "the main job"
    seconds, metrics = run("sft")
    losses = [entry["loss"] for entry in metrics if "loss" in entry]
    first, last = losses[0], statistics.fmean(losses[-20:])
    record(table, "sft", "loss falls by", 100 * (1 - last / first), "%")
    record(table, "sft", "over the start of two ranks", seconds / start_seconds(), "x")
    record(table, "sft", "whole job", seconds, "s")
    record(table, "sft", "optimizer steps", len(losses))
    record(table, "sft", "loss of the first step", first)
    record(table, "sft", "loss of the last 20 steps", last)


def ppo() -> None:
    table = "the built-in task of PPO"
    start = start_seconds()
    for seed in range(3):
        seconds, metrics = run(f"ppo --seed {seed}")
        rewards = [entry["reward"] for entry in metrics if "reward" in entry]
        record(table, f"seed {seed}", "reward of the last 10 iterations", statistics.fmean(rewards[-10:]))
        record(table, f"seed {seed}", "over the start of two ranks", seconds / start, "x")
        record(table, f"seed {seed}", "whole job", seconds, "s")
        record(table, f"seed {seed}", "iterations", len(rewards))
        record(table, f"seed {seed}", "reward of the first iteration", rewards[0])


if __name__ == "__main__":
    {"sft": sft, "ppo": ppo, "import": import_trainer}[sys.argv[1]]()
