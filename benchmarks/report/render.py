"""The report and the README's figures: pure functions of the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.record import Record, number
from benchmarks.report.claims import CLAIMS
from benchmarks.report.measure import Run, load
from benchmarks.report.pictures import PICTURES, draw
from benchmarks.report.sections import SECTIONS, Section

READING = """\
Ratios come first: they are between what ran in the same minutes, rivals or probes of the machine, and are what another machine can
compare with. Times are those of this machine. Each value is the median of its runs, with the smallest and the largest behind it; where
there is none, there was one run, or the value does not vary. `OMP_NUM_THREADS=1` everywhere; `taskset` pins what is single-threaded to
one core. Load is that of the minute before a section (two sections in a row load it themselves): above 1 other work may have run
beside it, and times and waits are then worse than on a free machine."""

BEGIN, END = "<!-- figures: python -m benchmarks.report --sections -->", "<!-- end of figures -->"


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_report(path: Path, runs: list[Run]) -> Path:
    """The report of the records in `path`, beside it, with its pictures; older pictures go."""
    for old in path.parent.glob(f"{path.stem}_*.png"):
        old.unlink()
    ran = [section for section in SECTIONS if any(run.section == section.name for run in runs)]
    blocks = ["# Benchmarks of multipack", facts(runs), READING, "## Summary", summary(runs)]
    records = [record for run in runs for record in run.records]
    for picture in PICTURES:
        file = path.with_name(f"{path.stem}_{picture.name}.png")
        if draw(file, picture, [record for record in records if record.parts[0] == picture.table]):
            blocks.append(f"![{picture.title}]({file.name})")
    blocks += [section_text(section, [run for run in runs if run.section == section.name]) for section in ran]
    report = path.with_suffix(".md")
    report.write_text("\n\n".join(blocks) + "\n")
    return report


def facts(runs: list[Run]) -> str:
    missing = [
        section.name + (f" ({section.lacks()})" if section.lacks() else "")
        for section in SECTIONS
        if not any(run.section == section.name for run in runs)
    ]
    started = sorted(run.started for run in runs)
    rows = [
        ["machine", "; ".join(dict.fromkeys(run.machine for run in runs))],
        ["versions", "; ".join(dict.fromkeys(run.versions for run in runs))],
        ["command", "`python -m benchmarks.report`"],
        [
            "measured",
            f"{started[0]} to {started[-1]}, commit {', '.join(dict.fromkeys(run.commit for run in runs))}",
        ],
        ["time", f"{sum(run.seconds for run in runs) / 60:.1f} minutes in all sections"],
        ["not measured", ", ".join(missing) or "-"],
    ]
    return markdown_table(["", ""], rows)


def summary(runs: list[Run]) -> str:
    """Every claim has its row, also one that was not measured."""
    found = {record.name: (record, run) for run in runs for record in run.records}
    rows, verdicts = [], []
    for claim in CLAIMS:
        bound, where = f"{claim.sign} {claim.limit:g}", claim.section
        if claim.record in found:
            record, run = found[claim.record]
            verdicts.append("yes" if claim.holds(record) else "**no**")
            cells = [with_unit(record), verdicts[-1], f"{run.load:.1f}"]
            where = anchored(next(section for section in SECTIONS if section.name == claim.section))
        else:
            verdicts.append("not measured")
            cells = ["-", verdicts[-1], "-"]
        rows.append([claim.what, claim.against, bound, *cells, where])
    counts = ", ".join(f"{verdict}: {count}" for verdict, count in Counter(verdicts).items())
    columns = ["claim", "against", "bound", "measured", "holds", "load", "section"]
    return f"{len(CLAIMS)} claims; {counts}.\n\n{markdown_table(columns, rows)}"


def with_unit(record: Record) -> str:
    value = number(record.value, record.unit)
    spread = record.text.removeprefix(value)
    return f"**{value}{record.unit if record.unit == 'x' else f' {record.unit}'.rstrip()}**{spread}"


def anchored(section: Section) -> str:
    """A link to the section's heading, as Markdown viewers name it."""
    kept = "".join(letter for letter in section.title.lower() if letter.isalnum() or letter in " -")
    return f"[{section.title}](#{kept.replace(' ', '-')})"


def section_text(section: Section, runs: list[Run]) -> str:
    commands = "\n".join(
        f"- `{run.command}` ({run.seconds:.0f} s"
        + (f", **exit status {run.exit_status}**)" if run.exit_status else ")")
        for run in runs
    )
    stamp = f"Measured {runs[0].started}, load before {runs[0].load:.2f}:"
    records = [record for run in runs for record in run.records]
    return "\n\n".join([f"## {section.title}", section.method, f"{stamp}\n\n{commands}", *tables(records)])


def tables(records: Sequence[Record]) -> list[str]:
    """A Markdown table for each table of the records: rows and columns as they came, units in the head."""
    made = []
    for table in dict.fromkeys(record.parts[0] for record in records):
        of = [record for record in records if record.parts[0] == table]
        columns = {(record.parts[2], record.unit): None for record in of}
        cells = {(record.parts[1], record.parts[2], record.unit): record.text for record in of}
        head = [table, *(f"{column} ({unit})" if unit else column for column, unit in columns)]
        rows = [
            [row, *(cells.get((row, *column), "") for column in columns)]
            for row in dict.fromkeys(record.parts[1] for record in of)
        ]
        made.append(markdown_table(head, rows))
    return made


def figures(paths: Iterable[Path]) -> str:
    """The README's table: a column for each machine whose records are kept."""
    machines = {path.stem: {r.name: r for run in load(path) for r in run.records} for path in paths}
    rows = []
    for claim in (claim for claim in CLAIMS if claim.in_readme):
        cells = [with_unit(of[claim.record]) if claim.record in of else "-" for of in machines.values()]
        rows.append([claim.what, claim.against, *cells])
    heads = [f"[{name}](benchmarks/results/{name}.md)" for name in machines]
    return markdown_table(["what", "against", *heads], rows)


def with_figures(readme: str, paths: Iterable[Path]) -> str:
    """The README with the figures of these records between its markers."""
    before, marker, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (marker and end):
        raise ValueError(
            f"the README lacks the lines {BEGIN!r} and {END!r}, between which its figures stand."
        )
    return f"{before}{BEGIN}\n\n{figures(paths)}\n\n{END}{after}"
