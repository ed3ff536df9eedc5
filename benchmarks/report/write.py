"""Write the report: the summary, then each section with its tables and plots. A pure function of the records."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import machine
from benchmarks.report.claim import Claim
from benchmarks.report.claims import CLAIMS
from benchmarks.report.measure import SectionRecord
from benchmarks.report.plots import save_plot
from benchmarks.report.sections import SECTIONS, Plot, Section
from benchmarks.report.tables import find_table, markdown_table

READING = (
    "Ratios come first: they are between rivals that ran in the same minutes, and are what another machine can compare with. Times are those of this "
    "machine. The spread stands beside each of them, from the smallest to the largest run, or as the table's own text says. "
    "`OMP_NUM_THREADS=1` everywhere; `taskset` pins what is single-threaded to one core. Load is that of the minute before a section (two sections in a row "
    "load it themselves): above 1 other work may have run beside it, and times and waits are then worse than on a free machine."
)

NO_VALUE = "**no value**"
NOT_MEASURED = "**not measured**"


def write_report(
    folder: Path, sections: list[tuple[Section, SectionRecord]], command: str
) -> tuple[Path, list[str]]:
    """Returns the path of the report, whose plots lie beside it and begin with its name, and the claims of its sections that have no value."""
    path = folder / f"report_{machine.name()}_{time.strftime('%Y-%m-%d')}.md"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{path.stem}_*.png"):
        old.unlink()
    found = {section.name: (section, record) for section, record in sections}
    claims = [summary_row(claim, found) for claim in CLAIMS]
    blocks = [
        "# Benchmarks of multipack",
        facts(command, sections),
        READING,
        "## Summary",
        summary(claims),
        *(section_text(path, section, record) for section, record in sections),
    ]
    path.write_text("\n\n".join(blocks) + "\n")
    return path, [what for what, _, _, verdict, *_ in claims if verdict == NO_VALUE]


def facts(command: str, sections: list[tuple[Section, SectionRecord]]) -> str:
    commits = ", ".join(dict.fromkeys(record.commit for _, record in sections))
    seconds = sum(part.seconds for _, record in sections for part in record.records)
    measured = [section for section, _ in sections]
    missing = [
        section.name + (f" ({section.lacks()})" if section.lacks() else "")
        for section in SECTIONS
        if section not in measured
    ]
    rows = [
        ["machine", machine.description()],
        ["versions", machine.versions()],
        ["command", f"`{command}`"],
        [
            "measured",
            f"{min(record.started for _, record in sections)} to {max(record.started for _, record in sections)}, commit {commits}",
        ],
        ["time", f"{seconds / 60:.1f} minutes in all sections"],
        ["not measured", ", ".join(missing) or "-"],
    ]
    return markdown_table(["", ""], rows)


def summary(claims: list[list[str]]) -> str:
    verdicts = Counter(verdict for _, _, _, verdict, *_ in claims)
    counts = ", ".join(f"{verdict}: {count}" for verdict, count in verdicts.items())
    columns = ["claim", "bound", "measured", "holds", "load", "section"]
    return f"{len(claims)} claims; {counts}.\n\n{markdown_table(columns, claims)}"


def summary_row(claim: Claim, found: dict[str, tuple[Section, SectionRecord]]) -> list[str]:
    """Every claim has its row, also one that was not measured or whose value cannot be found."""
    limits = f"{claim.bound.sign} {listed(claim, claim.bound.limits, short=True)}"
    if claim.section not in found:
        return [claim.what, limits, "-", NOT_MEASURED, "-", claim.section]
    section, record = found[claim.section]
    where = [f"{record.load:.1f}", f"[{section.title}](#{anchor(section.title)})"]
    try:
        values = claim.values(record.markdown)
    except ValueError as error:
        return [claim.what, limits, str(error).replace("|", "\\|"), NO_VALUE, *where]
    verdict = "yes" if claim.bound.holds(values) else "**no**"
    return [claim.what, limits, f"**{listed(claim, values)}**", verdict, *where]


def listed(claim: Claim, values: Sequence[float], short: bool = False) -> str:
    """Values with their unit; equal limits once."""
    if short and len(set(values)) == 1:
        values = values[:1]
    unit = re.sub(r"\{[^}]*\}", "", claim.unit)
    numbers = [f"{value:g}" if short else claim.unit.format(value).removesuffix(unit) for value in values]
    return ", ".join(numbers) + unit


def section_text(path: Path, section: Section, record: SectionRecord) -> str:
    commands = "\n".join(
        f"- `{found.command}` ({found.seconds:.0f} s"
        + (f", **exit status {found.exit_status}**)" if found.exit_status else ")")
        for found in record.records
    )
    stamp = f"Measured {record.started}, load before {record.load:.2f}:"
    blocks = [f"## {section.title}", section.method, f"{stamp}\n\n{commands}"]
    blocks += [
        picture(path.with_name(f"{path.stem}_{plot.name}.png"), plot, record) for plot in section.plots
    ]
    blocks.append(record.markdown)
    return "\n\n".join(blocks)


def picture(path: Path, plot: Plot, record: SectionRecord) -> str:
    """The Markdown that shows the plot; or that says why there is none."""
    try:
        save_plot(path, plot.title, plot.draw, find_table(record.markdown, plot.table))
    except ValueError as error:
        return f"No picture of {plot.title!r}: {error}"
    return f"![{plot.title}]({path.name})"


def anchor(title: str) -> str:
    """As Markdown viewers name headings."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
