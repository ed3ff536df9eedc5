"""However a run ends, its threads, processes, files and memory go with it, within a second and without a word
of complaint."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader

class Slow:
    def __init__(self, seconds=0.005, count=10**6):
        self.seconds, self.count = seconds, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index
"""


def run(
    script: str, *, timeout: float = 60, interrupt_after: float | None = None
) -> tuple[int, str, str, float]:
    """Run a script that prints "go" when ready. Returns its exit code, output, errors and the seconds from
    "go" or SIGINT."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        started = time.monotonic()
        if interrupt_after is not None:
            time.sleep(interrupt_after)
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
    return process.returncode, line + out, err, time.monotonic() - started


@pytest.mark.parametrize(
    "way",
    [
        "num_workers=0",
        "num_workers=1",
        "num_workers=3, worker_type='thread'",
        "num_workers=1, worker_type='process'",
    ],
)
def test_the_interpreter_exits_at_once_with_a_live_iterator(way: str) -> None:
    code, out, err, seconds = run(
        f"""
        iterator = iter(DataLoader(Slow(), batch_size=2, {way}))
        next(iterator)
        print("go")
        """
    )
    assert (code, out, err) == (0, "go\n", "")
    assert seconds < 5.0


@pytest.mark.report("google/grain#1196")
def test_an_exception_in_main_ends_the_process_with_one_traceback() -> None:
    # google/grain#1196
    code, _, err, seconds = run(
        """
        def main():
            iterator = iter(DataLoader(Slow(), batch_size=2, num_workers=2))
            next(iterator)
            print("go")
            raise RuntimeError("in training")
        main()
        """
    )
    assert code == 1
    assert err.count("Traceback") == 1
    assert "RuntimeError: in training" in err
    assert "Exception ignored" not in err
    assert seconds < 5.0


def test_a_row_that_hangs_does_not_keep_the_process() -> None:
    code, _, err, seconds = run(
        """
        class Hanging(Slow):
            def __getitem__(self, index):
                if index == 3:
                    threading.Event().wait()
                return index
        iterator = iter(DataLoader(Hanging(), num_workers=1, worker_type="thread"))
        next(iterator)
        print("go")
        """
    )
    assert (code, err) == (0, "")
    assert seconds < 5.0


@pytest.mark.parametrize("kind", ["packed", "slow"])
def test_ctrl_c_at_any_moment_ends_the_run(kind: str) -> None:
    # One process takes many interrupts: each must surface as KeyboardInterrupt and leave no thread.
    code, out, err, _ = run(
        f"""
        import random
        rows = (np.zeros(300_000, np.int32), np.arange(0, 300_001, 3))
        make = {{
            "packed": lambda: packed_dataloader(rows, 4096, num_workers=2, rank=0, num_replicas=1),
            "slow": lambda: DataLoader(Slow(0.002), batch_size=3, num_workers=2, worker_type="thread"),
        }}[{kind!r}]
        main = threading.main_thread().ident
        rng = random.Random(0)
        surfaced = slow_ends = 0
        next(iter(make()))  # what is imported on first use
        print("go", flush=True)
        for attempt in range(100):
            fired = threading.Event()
            def fire():
                time.sleep(rng.uniform(0.0, 0.02))
                fired.set()
                signal.pthread_kill(main, signal.SIGINT)
            try:
                shooter = threading.Thread(target=fire)
                shooter.start()
                while True:
                    for number, batch in enumerate(make()):
                        pass
            except KeyboardInterrupt:
                surfaced += 1
            shooter.join()
            limit = time.monotonic() + 1.0
            while threading.active_count() > 1 and time.monotonic() < limit:
                time.sleep(0.001)
            slow_ends += threading.active_count() > 1
        print(surfaced, slow_ends)
        """
    )
    assert err == ""
    assert (code, out) == (0, "go\n100 0\n")


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_process_that_is_interrupted_ends_with_its_children(worker_type: str) -> None:
    code, _, err, seconds = run(
        f"""
        print("go", flush=True)
        for batch in DataLoader(Slow(0.01), batch_size=3, num_workers=2, worker_type={worker_type!r}):
            pass
        """,
        interrupt_after=0.5,
    )
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert seconds < 5.0


def test_a_fork_with_a_live_loader_leaves_both_processes_well() -> None:
    code, out, err, _ = run(
        """
        loader = DataLoader(Slow(0.001, 300), batch_size=3, num_workers=2, worker_type="thread")
        iterator = iter(loader)
        first = next(iterator)
        print("go", flush=True)
        child = os.fork()
        if child == 0:
            try:
                next(iterator)
            except RuntimeError as error:
                assert "Make a new iterator" in str(error), error
            assert len(list(loader)) == 100
            sys.exit(7)  # an orderly exit, with all its finalizers
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(list(iterator)) == 99
        """
    )
    assert (code, out, err) == (0, "go\n", "")


# Helpers of multiprocessing, its fork server and its resource tracker, stay from the first test that needs
# them to the end.
_THERE_BEFORE: set[int] = set()
# Threads of passes that an error's traceback keeps alive, in tests of other files.
_THREADS_BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _what_multiprocessing_keeps() -> None:
    _THERE_BEFORE.clear()
    _THERE_BEFORE.update(child.pid for child in psutil.Process().children())
    _THREADS_BEFORE.clear()
    _THREADS_BEFORE.update(loader_threads())


def worker_processes() -> list[psutil.Process]:
    """Children that the test itself has started."""
    return [child for child in psutil.Process().children() if child.pid not in _THERE_BEFORE]


class Dying(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 30 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_worker_process_is_an_error_and_leaves_no_process() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="worker"):
        list(DataLoader(Dying(), batch_size=4, num_workers=2, worker_type="process"))
    assert time.monotonic() - started < 10.0
    assert wait_until(lambda: not worker_processes())


class Failing(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 30:
            raise OSError("disk")
        return index


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_an_error_of_a_row_leaves_no_thread_and_no_process(worker_type: str) -> None:
    started = time.monotonic()
    with pytest.raises(OSError, match="disk"):
        list(DataLoader(Failing(), batch_size=4, num_workers=2, worker_type=worker_type))
    gc.collect()  # the error's traceback holds the iterator, as torch's does
    assert wait_until(lambda: not worker_processes() and not loader_threads())
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_consumer_that_leaves_early_leaves_no_thread_and_no_process(worker_type: str) -> None:
    for _ in DataLoader(Failing(), batch_size=4, num_workers=2, worker_type=worker_type, prefetch_batches=4):
        break
    assert wait_until(lambda: not worker_processes() and not loader_threads(), limit_s=1.0)


def test_an_iterator_that_was_never_asked_leaves_no_process() -> None:
    iterator = iter(DataLoader(Failing(), batch_size=4, num_workers=2, worker_type="process"))
    assert len(worker_processes()) == 2  # torch starts them here
    del iterator
    assert wait_until(lambda: not worker_processes(), limit_s=1.0)


def test_a_thousand_loaders_leave_no_thread_file_or_memory() -> None:
    rows = (torch.arange(6000, dtype=torch.int32).numpy(), torch.arange(0, 6001, 3).numpy())

    def open_and_drop(count: int) -> None:
        for number in range(count):
            loader = packed_dataloader(rows, 256, num_workers=1 + number % 2, rank=0, num_replicas=1)
            for _ in loader:
                if number % 3:
                    break

    process = psutil.Process()
    open_and_drop(200)
    gc.collect()
    wait_until(lambda: not loader_threads())
    before = process.num_threads(), process.num_fds(), process.memory_info().rss
    open_and_drop(1000)
    gc.collect()
    assert wait_until(lambda: not loader_threads())
    assert wait_until(lambda: process.num_threads() <= before[0])
    assert process.num_fds() <= before[1]
    assert process.memory_info().rss - before[2] < 20e6


def test_the_source_of_a_dropped_pass_is_dropped_too(tmp_path: Path) -> None:
    class OpenFile(torch.utils.data.IterableDataset[str]):
        def __iter__(self) -> Any:
            path = tmp_path / "rows.txt"
            path.write_text("row\n" * 1000)
            with path.open() as lines:
                yield from lines

    process = psutil.Process()
    before = len(process.open_files())
    iterator = iter(DataLoader(OpenFile(), batch_size=2))
    next(iterator)
    assert len(process.open_files()) == before + 1
    del iterator
    assert wait_until(lambda: len(process.open_files()) == before)


def loader_threads() -> list[threading.Thread]:
    """Threads that the test itself has started."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("multipack-")]
    return [thread for thread in ours if thread not in _THREADS_BEFORE]


def wait_until(condition: Any, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())
