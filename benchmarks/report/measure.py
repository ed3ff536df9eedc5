"""Run a section's commands, one after another, and keep their records. Each command is a process of its own;
nothing runs beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.record import FILE, MACHINE, Record
from benchmarks.report.sections import Section

LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command that ran, and what it measured."""

    section: str
    command: str
    seconds: float
    exit_status: int
    """0, or that of a benchmark that found a wrong answer, or never ended."""
    started: str
    load: float
    """Processes that wanted a core in the minute before. Above 0.5 something else ran, and times say
    little."""
    machine: str
    versions: str
    commit: str
    records: list[Record] = field(default_factory=list)


def measure(section: Section, rounds: int) -> list[Run]:
    pin = f"taskset -c {machine.last_core()} "
    runs = []
    for line in section.commands:
        runs.append(run(section.name, line.format(pin=pin, rounds=rounds)))
        print(f"{runs[-1].seconds:6.1f} s  {section.name}: {runs[-1].command}", flush=True)
        if runs[-1].exit_status:
            print(f"          exit status {runs[-1].exit_status}", flush=True)
    return runs


def run(section: str, command: str, limit_s: float = LIMIT_S) -> Run:
    started, load, began = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        said, records = Path(name) / "said", Path(name) / "records"
        records.touch()
        environment = os.environ | {
            FILE: str(records),
            MACHINE: machine.name(),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        }
        status = exit_status(shlex.split(command), environment, said, limit_s)
        if status:
            print(said.read_text(errors="replace")[-5000:], file=sys.stderr)
        found = [Record(**json.loads(line)) for line in records.read_text().splitlines()]
    return Run(
        section=section,
        command=command,
        seconds=round(time.perf_counter() - began, 1),
        exit_status=status,
        started=started,
        load=round(load, 2),
        machine=machine.description(),
        versions=machine.versions(),
        commit=machine.commit(),
        records=found,
    )


def exit_status(words: list[str], environment: dict[str, str], said: Path, limit_s: float) -> int:
    """Run a command, what it says into a file.

    Returns its exit status; as shells do, 127 where there is no such program, and 124 after `limit_s`, when
    it and all that it started are ended.
    """
    with said.open("w") as out:
        try:
            process = subprocess.Popen(
                words, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            out.write(str(error))
            return 127
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            out.write(f"Stopped after {limit_s:g} s.")
            return 124
        finally:
            if process.returncode is None:
                end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: torchrun ends its workers, which are in groups of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def save(path: Path, runs: Iterable[Run]) -> None:
    """JSON lines: a run, then its records, then the next run."""
    lines = []
    for run in runs:
        fields = asdict(run)
        lines += [fields, *fields.pop("records")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def load(path: Path) -> list[Run]:
    runs: list[Run] = []
    for fields in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        if "command" in fields:
            runs.append(Run(**fields))
        else:
            runs[-1].records.append(Record(**fields))
    return runs
