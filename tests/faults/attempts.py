"""Attempts at a run in processes of their own, which are forked from one that has imported everything: a new
attempt begins in milliseconds.

An attempt writes what it says to a file, and may be told where to die.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["multipack.train.sft"])


def start(function: Callable[..., Any], *arguments: Any, said: Path, **environment: str) -> ForkServerProcess:
    """Call `function(*arguments)` in a process of its own; what it writes goes to the file `said`."""
    process = _server.Process(target=_call, args=(function, arguments, str(said), environment))
    process.start()
    return process


def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], said: str, environment: dict[str, str]
) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method("fork", force=True)  # as on Linux by default, not from a second server
    function(*arguments)


def start_ranks(
    ranks: int,
    arguments: Sequence[str],
    said: Path,
    die_at: str | None = None,
    largest_bytes: int | None = None,
) -> list[ForkServerProcess]:
    """One attempt at a supervised run on so many ranks.

    Args:
        die_at: where rank 0 is killed; see `_die_at`.
        largest_bytes: of a file that rank 0 may write, as on a full disk.
    """
    port = _free_port()
    return [
        start(
            train,
            list(arguments),
            die_at if rank == 0 else None,
            largest_bytes if rank == 0 else None,
            said=said,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        for rank in range(ranks)
    ]


def train(arguments: list[str], die_at: str | None = None, largest_bytes: int | None = None) -> None:
    """`python -m multipack.train sft`, on this rank."""
    import torch

    from multipack.train import sft

    torch.set_num_threads(1)
    if die_at is not None:
        _die_at(die_at)
    if largest_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, largest_bytes))
    sft.main(arguments)


def _die_at(place: str) -> None:
    """Kill this process at "module:function", before its second call, or behind that with
    "module:function:after"."""
    module_name, name, *after = place.split(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name)
    calls = 0

    @functools.wraps(function)
    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **named)
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, dying)


def ended(processes: Sequence[ForkServerProcess], limit_s: float) -> list[int | None]:
    """Exit codes once all have ended, or at the limit, when None stands for those that still run."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


@contextmanager
def killed_at_the_end(processes: list[ForkServerProcess]) -> Iterator[list[ForkServerProcess]]:
    """Leave no process behind, whatever the test found."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def write_texts(path: Path, count: int) -> Path:
    """Rows of 5 to 60 bytes."""
    rows = ["abcdefgh "[row % 9] * (5 + row * 37 % 56) for row in range(count)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def keys(folder: Path, **more: object) -> list[str]:
    """Arguments of a run of some seconds whose files are all in `folder`; it notes the rows of every step."""
    values = {
        "data": folder / "texts.jsonl",
        "dataset_prepared_path": folder / "prepared",
        "output_dir": folder / "out",
        "sequence_len": 64,
        "overrides_of_model_config": json.dumps(SHAPE),
        "lr_scheduler": "constant",
        "bf16": "false",
        "log_rows": "true",
    }
    return [f"--{key}={value}" for key, value in (values | more).items()]


def rows_seen(folder: Path) -> list[int]:
    """Rows that count, of all ranks and steps, ascending."""
    logs = (folder / "out" / "rows").glob("rank-*.jsonl")
    lines = [line for path in logs for line in path.read_text().splitlines()]
    return sorted(row for line in lines for row in json.loads(line)["rows"])


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints, ascending."""
    names = [path.name for path in (folder / "out").glob("checkpoint-*") if path.suffix != ".partial"]
    return sorted(int(name.split("-")[1]) for name in names)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
