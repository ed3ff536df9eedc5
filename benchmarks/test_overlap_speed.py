"""What a loader costs the training loop beside it: waiting for batches, and time of the interpreter.

    python -m pytest benchmarks/test_overlap_speed.py -s

Two loops. One sleeps 20 ms a step, as when a GPU computes and the interpreter is free: the step must take
what it takes alone. The other starts 3,000 tiny torch operations a step, as a model of many small kernels
does: a loader that works under the interpreter's lock slows it down. Where the machine has two cores, the
loop gets one and the loader's threads and processes the other.

Rounds of all loaders alternate, and ratios are between neighbours: the loop alone says what the sleep itself
takes, and a thread that only waits shows what else ran on the machine meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from benchmarks.loading_rivals import Workload, our_loader, torch_loader, workload
from benchmarks.probes import sleep, tiny_operations
from benchmarks.record import record
from multipack.loading.prefetch import Prefetcher

STEPS = 20
ROUNDS = 20
EVERY = 7
"""Rivals, whose steps take long, run in every seventh round."""
pytestmark = pytest.mark.filterwarnings("ignore")  # the rivals' own


class Step(NamedTuple):
    """Mean milliseconds of a step: the loop's own work, and the wait for its batch."""

    work_ms: float
    wait_ms: float

    @property
    def ms(self) -> float:
        return self.work_ms + self.wait_ms


def nothing(_: Workload) -> Iterator[Any]:
    while True:
        yield None


def idle_thread(_: Workload) -> Iterator[Any]:
    """A thread that waits and does nothing: what a loop pays for being one of two."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    try:
        while True:
            yield None
    finally:
        ended.set()
        thread.join()


def thread_over_lists(data: Workload) -> Iterator[Any]:
    """A thread in front of a loader that collates Python lists: what the threaded multipack loader of 2023
    was."""
    return iter(Prefetcher(torch_loader(data, workers=0), depth=4))


ALONE, IDLE, OURS = "no loader", "an idle thread", "multipack DataLoader, 1 thread"
LOADERS: dict[str, Callable[[Workload], Iterator[Any]]] = {
    ALONE: nothing,
    IDLE: idle_thread,
    OURS: our_loader,
    "torch DataLoader + trl, 0 workers": functools.partial(torch_loader, workers=0),
    "torch DataLoader + trl, 1 worker": functools.partial(torch_loader, workers=1),
    "torch DataLoader + trl, rows as tensors, 1 worker": functools.partial(
        torch_loader, workers=1, tensors=True
    ),
    "a thread over torch DataLoader + trl": thread_over_lists,
}


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
    """The main thread to the last core, every other thread and child to the others; on one core all stay.

    Threads and children may end while this looks at them; then there is nothing to place.
    """
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    cores: set[int] = set()
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):
            cores |= os.sched_getaffinity(task)
    last = max(cores)
    if cores == {last}:
        return
    main = threading.get_native_id()
    for task in [*tasks, *(child.pid for child in psutil.Process().children(recursive=True))]:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(task, {last} if task == main else cores - {last})


def beside(loop: str, work: Callable[[], None]) -> None:
    """Record a loop beside each loader: its step and its work over the same round's alone, and its
    waiting."""
    torch.set_num_threads(1)
    rounds: dict[str, dict[int, Step]] = {name: {} for name in LOADERS}
    with workload(150_000) as data:
        for number in range(ROUNDS):
            for name, make in LOADERS.items():
                if name in (ALONE, IDLE, OURS) or number % EVERY == 0:
                    rounds[name][number] = run(make, data, work, STEPS)
    alone, idle = rounds[ALONE], rounds[IDLE]
    for name, steps in rounds.items():
        whole = [step.ms / alone[number].ms for number, step in steps.items()]
        own = [step.work_ms / idle[number].work_ms for number, step in steps.items()]
        record(loop, f"beside {name}", "step over alone", whole, "x")
        record(loop, f"beside {name}", "work over beside an idle thread", own, "x")
        record(
            loop, f"beside {name}", "waiting", [100 * step.wait_ms / step.ms for step in steps.values()], "%"
        )
        record(loop, f"beside {name}", "work", [step.work_ms for step in steps.values()], "ms")
        record(loop, f"beside {name}", "wait", [step.wait_ms for step in steps.values()], "ms")


def test_beside_a_sleeping_loop() -> None:
    beside("a step of 20 ms sleep", sleep)


def test_beside_a_loop_of_tiny_operations() -> None:
    beside("a step of 3,000 tiny operations", tiny_operations)
