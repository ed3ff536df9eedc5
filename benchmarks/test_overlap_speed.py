"""What a loader costs the training loop beside it: waiting for batches, and time of the interpreter.

    python -m pytest benchmarks/test_overlap_speed.py -s          # checks the claims
    python -m benchmarks.test_overlap_speed                       # prints the tables

Two loops. One sleeps 20 ms a step, as when a GPU computes and the interpreter is free: the step must take what it takes alone. The other
starts 3,000 tiny torch operations a step, as a model of many small kernels does: a loader that works under the interpreter's lock
slows it down. Where the machine has two cores, the loop gets one and the loader's threads and processes the other.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.loading_rivals import Workload, our_loader, torch_loader, workload
from multipack.loading.prefetch import Prefetcher

STEP_S = 0.020
SLEEP_STEPS = 100
LAUNCH_STEPS = 60
TINY = torch.zeros(8)
pytestmark = pytest.mark.filterwarnings("ignore")  # the rivals' own


class Step(NamedTuple):
    """Milliseconds of a step: the loop's own work, and the wait for its batch."""

    work_ms: float
    wait_ms: float

    @property
    def ms(self) -> float:
        return self.work_ms + self.wait_ms

    @property
    def wait_share(self) -> float:
        return self.wait_ms / self.ms


def nothing(_: Workload) -> Iterator[Any]:
    while True:
        yield None


def thread_over_lists(data: Workload) -> Iterator[Any]:
    """A thread in front of a loader that collates Python lists: what the threaded multipack loader of 2023 was."""
    return iter(Prefetcher(torch_loader(data, workers=0), depth=4))


LOADERS: dict[str, Callable[[Workload], Iterator[Any]]] = {
    "no loader": nothing,
    "torch DataLoader + trl, 0 workers": functools.partial(torch_loader, workers=0),
    "torch DataLoader + trl, 1 worker": functools.partial(torch_loader, workers=1),
    "torch DataLoader + trl, rows as tensors, 1 worker": functools.partial(
        torch_loader, workers=1, tensors=True
    ),
    "a thread over torch DataLoader + trl": thread_over_lists,
    "multipack DataLoader, 1 thread": our_loader,
}


def sleep() -> None:
    time.sleep(STEP_S)


def launch() -> None:
    for _ in range(3000):
        TINY.add_(1.0)


def run(
    make: Callable[[Workload], Iterator[Any]], data: Workload, work: Callable[[], None], steps: int
) -> Step:
    """Mean step over a loop, after one warm step. The queue fills during the loop's own work."""
    gc.collect()
    iterator = make(data)
    next(iterator)
    place_others_apart()
    work()
    worked, waited = [], []
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(iterator)
        started = time.perf_counter()
        work()
        worked.append(time.perf_counter() - started)
        waited.append(started - asked)
        del batch
    return Step(1e3 * statistics.mean(worked), 1e3 * statistics.mean(waited))


def place_others_apart() -> None:
    """The main thread to the last core, every other thread and child to the others; on one core all stay."""
    cores = sorted(os.sched_getaffinity(0) | _others_cores())
    if len(cores) < 2:
        return
    main = threading.get_native_id()
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {cores[-1]} if int(task) == main else set(cores[:-1]))
    for child in _children():
        os.sched_setaffinity(child, set(cores[:-1]))


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def _others_cores() -> set[int]:
    cores: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        cores |= os.sched_getaffinity(int(task))
    return cores


def sleeping_loop() -> dict[str, Step]:
    with workload(150_000) as data:
        return {
            name: run(make, data, sleep, SLEEP_STEPS if name in QUICK else 20)
            for name, make in LOADERS.items()
        }


def launching_loop() -> dict[str, Step]:
    """Rounds are interleaved, so that a change of the machine's speed meets all loaders; the best round of each counts."""
    torch.set_num_threads(1)
    with workload(150_000) as data:
        rounds: dict[str, list[Step]] = {name: [] for name in LOADERS}
        for _ in range(3):
            for name, make in LOADERS.items():
                rounds[name].append(run(make, data, launch, LAUNCH_STEPS if name in QUICK else 10))
        return {name: min(steps, key=lambda step: step.work_ms) for name, steps in rounds.items()}


QUICK = ("no loader", "multipack DataLoader, 1 thread")


def test_a_sleeping_loop_does_not_notice_the_loader() -> None:
    steps = sleeping_loop()
    print("\n" + table("20 ms sleep", steps))
    ours = steps["multipack DataLoader, 1 thread"]
    assert ours.ms <= 1.02 * steps["no loader"].ms
    assert ours.wait_share <= 0.01


def test_a_launch_bound_loop_is_slowed_by_less_than_a_tenth() -> None:
    steps = launching_loop()
    print("\n" + table("3,000 tiny operations", steps))
    assert steps["multipack DataLoader, 1 thread"].work_ms <= 1.10 * steps["no loader"].work_ms


def table(title: str, steps: dict[str, Step]) -> str:
    alone = steps["no loader"].work_ms
    lines = [f"| {title}, beside | work ms | x alone | wait ms | wait share |", "|---|---|---|---|---|"]
    for name, step in steps.items():
        lines.append(
            f"| {name} | {step.work_ms:.2f} | {step.work_ms / alone:.2f} | {step.wait_ms:.3f} | {step.wait_share:.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("20 ms sleep", sleeping_loop()))
    print(table("3,000 tiny operations", launching_loop()))
