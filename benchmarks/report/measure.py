"""Run the commands of a section, one after another, and keep what they said.

Each command is a process of its own. Nothing of the report runs beside it.
"""

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import machine
from benchmarks.report.sections import Command, Section
from benchmarks.report.tables import benchmark_groups, separated

RECORDS = Path("runs/report")
LIMIT_S = 400


@dataclass(frozen=True)
class Record:
    """One command that ran."""

    command: str
    markdown: str
    """Its tables and sentences."""
    seconds: float
    exit_status: int
    """0, or that of a benchmark that found a wrong answer, missed its own bound, or never ended."""


@dataclass(frozen=True)
class SectionRecord:
    """What a section measured, when, and how busy the machine was before."""

    records: list[Record]
    started: str
    commit: str
    load: float
    """Processes that wanted a core in the minute before. Above 0.5 something else ran, and times say little."""

    @property
    def markdown(self) -> str:
        return separated("\n\n".join(record.markdown for record in self.records))


def measure(section: Section, rounds: int, say: Callable[[str], None]) -> SectionRecord:
    started, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    records = []
    for command in section.commands:
        record = run(command, rounds)
        say(f"{record.seconds:6.1f} s  {section.name}: {record.command}")
        if record.exit_status:
            say(f"          exit status {record.exit_status}")
        records.append(record)
    return SectionRecord(records, started, machine.commit(), load)


def run(command: Command, rounds: int, limit_s: float = LIMIT_S) -> Record:
    text = command.text(machine.last_core(), rounds)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups = folder / "groups.json"
        words = shlex.split(text) + ([f"--benchmark-json={groups}"] if command.is_pytest else [])
        began = time.perf_counter()
        status = exit_status(words, environment, folder, limit_s)
        seconds = time.perf_counter() - began
        said, errors = (folder / "out").read_text(), (folder / "errors").read_text()
        markdown = said
        if command.is_pytest:
            tables = [line for line in said.splitlines() if line.startswith("|")]
            measured = groups.exists() and groups.stat().st_size
            found = json.loads(groups.read_text())["benchmarks"] if measured else []
            markdown = "\n\n".join(["\n".join(tables), *benchmark_groups(found)])
    if status:
        print(said[-3000:], errors[-3000:], sep="\n", file=sys.stderr)
    return Record(text, markdown.strip(), seconds, status)


def exit_status(words: list[str], environment: Mapping[str, str], folder: Path, limit_s: float) -> int:
    """Run a command, what it says into the files `out` and `errors`.

    Returns its exit status; as shells do, 127 where there is no such program, and 124 after `limit_s`, when it and all that it
    started are ended.
    """
    with (folder / "out").open("w") as out, (folder / "errors").open("w") as errors:
        try:
            process = subprocess.Popen(
                words, env=environment, stdout=out, stderr=errors, start_new_session=True
            )
        except OSError as error:
            errors.write(str(error))
            return 127
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            errors.write(f"Stopped after {limit_s:g} s.")
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


def save(name: str, record: SectionRecord) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(asdict(record), indent=1))


def load(name: str) -> SectionRecord | None:
    path = RECORDS / f"{name}.json"
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    return SectionRecord(**{**fields, "records": [Record(**record) for record in fields["records"]]})
