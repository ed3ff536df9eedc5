"""Ctrl-C at any moment: the process ends within two seconds, with an error and without leaving a child
behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from faults.attempts import ended, keys, killed_at_the_end, start, train, write_texts

MOST_SECONDS = 2.0


def read_for_ever(worker_type: Any, num_workers: int) -> None:
    """Passes over a small data set, one after the other, from planning to the last batch; with worker
    processes one long pass, because Python loses an interrupt that comes while it forks."""
    from multipack.loading.packed import packed_dataloader

    count = 3_000_000 if worker_type == "process" else 10_000
    rows = (np.zeros(3 * count, np.int32), np.arange(0, 3 * count + 1, 3))
    for number in itertools.count():
        loader = packed_dataloader(
            rows, 256, num_workers=num_workers, worker_type=worker_type, rank=0, num_replicas=1
        )
        for batch, _ in enumerate(loader):
            if number == batch == 0:
                _ready()


def _ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def interrupt(function: Any, *arguments: Any, said: Path, begun: Callable[[], bool], delay_s: float) -> float:
    """Start a process, send SIGINT so long after it has begun, and check how it ends. Returns the seconds
    that it took."""
    with killed_at_the_end([start(function, *arguments, said=said, OMP_NUM_THREADS="1")]) as processes:
        (process,) = processes
        assert process.pid is not None
        assert wait_for(begun, limit_s=60), said.read_text()
        time.sleep(delay_s)
        family = psutil.Process(process.pid)
        children = family.children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        sent = time.monotonic()
        codes = ended(processes, limit_s=20)
        seconds = time.monotonic() - sent
    words = said.read_text()
    try:
        assert codes == [1], words[-3000:]
        assert seconds < MOST_SECONDS, words[-3000:]
        assert "KeyboardInterrupt" in words
        assert "Exception ignored" not in words
        assert wait_for(lambda: not any(child.is_running() for child in children), limit_s=MOST_SECONDS)
    finally:
        for child in children:
            if child.is_running():
                child.kill()
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker_type", "num_workers", "tries"), [("thread", 2, 7), ("process", 2, 4), ("thread", 0, 2)]
)
def test_a_reading_process_ends_at_once(
    worker_type: str, num_workers: int, tries: int, tmp_path: Path, long_form: bool
) -> None:
    rng = random.Random(0)
    took_s = []
    for attempt in range(tries * (13 if long_form else 1)):
        said = tmp_path / f"said-{attempt}"
        took_s += [
            interrupt(
                read_for_ever,
                worker_type,
                num_workers,
                said=said,
                begun=lambda said=said: said.exists() and "ready" in said.read_text(),
                delay_s=rng.uniform(0.0, 0.4),
            )
        ]
    print(f"{len(took_s)} interrupts, the slowest end after {max(took_s):.2f} s")


@pytest.mark.slow
def test_a_training_process_ends_at_once(tmp_path: Path, long_form: bool) -> None:
    write_texts(tmp_path / "texts.jsonl", 300)
    rng = random.Random(0)
    metrics = tmp_path / "out" / "metrics.jsonl"
    took_s = []
    for attempt in range(40 if long_form else 3):
        said = tmp_path / f"said-{attempt}"
        metrics.unlink(missing_ok=True)
        took_s += [
            interrupt(
                train,
                keys(tmp_path, num_epochs=100, save_steps=3, num_workers=1),
                said=said,
                begun=lambda: metrics.exists() and bool(metrics.read_text()),
                delay_s=rng.uniform(0.0, 0.5),
            )
        ]
    print(f"{len(took_s)} interrupts, the slowest end after {max(took_s):.2f} s")
