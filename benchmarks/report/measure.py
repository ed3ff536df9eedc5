"""Run the commands of a section, one after another, and keep what they said.

Each command is a process of its own. Nothing of the report runs beside it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
    """0, or that of a benchmark that found a wrong answer or missed its own bound."""


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


def run(command: Command, rounds: int) -> Record:
    text = command.text(machine.last_core(), rounds)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    with tempfile.TemporaryDirectory() as folder:
        groups = Path(folder) / "groups.json"
        words = shlex.split(text) + ([f"--benchmark-json={groups}"] if command.is_pytest else [])
        began = time.perf_counter()
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Record(text, f"Stopped after {LIMIT_S} s.", LIMIT_S, 1)
        seconds = time.perf_counter() - began
        markdown = done.stdout
        if command.is_pytest:
            tables = [line for line in done.stdout.splitlines() if line.startswith("|")]
            found = json.loads(groups.read_text())["benchmarks"] if groups.exists() else []
            markdown = "\n\n".join(["\n".join(tables), *benchmark_groups(found)])
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
    return Record(text, markdown.strip(), seconds, done.returncode)


def save(name: str, record: SectionRecord) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(asdict(record), indent=1))


def load(name: str) -> SectionRecord | None:
    path = RECORDS / f"{name}.json"
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    return SectionRecord(**{**fields, "records": [Record(**record) for record in fields["records"]]})
