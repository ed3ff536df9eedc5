"""Run every benchmark and write one report, meant for under 20 minutes on 2 free cores.

    python -m benchmarks.report                                # all sections python -m benchmarks.report
    --sections packing balance     # these; the others as they were measured last python -m benchmarks.report
    --sections                     # measure nothing, write the report and the README's table again

Each benchmark is a process of its own, with its own pinning. Its records go to
benchmarks/results/<machine>.jsonl, and the report and its pictures, which are made from them alone, lie
beside that file. Leave the machine alone meanwhile: the load before each section is in the report. Ends with
an error, after the report was written, where a benchmark failed or a claim of its sections has no record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.report.claims import missing
from benchmarks.report.measure import load, measure, save
from benchmarks.report.render import with_figures, write_report
from benchmarks.report.sections import SECTIONS

RESULTS, README = Path("benchmarks/results"), Path("README.md")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument(
        "--sections", nargs="*", choices=names, help="measure only these; default: all that the machine can"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of growth and throughput; the others fix theirs"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    arguments = parser.parse_args()
    if arguments.sections is None:
        wanted = [section for section in SECTIONS if not section.lacks()]
    else:
        wanted = [section for section in SECTIONS if section.name in arguments.sections]
        for section in wanted:
            if section.lacks():
                parser.error(f"{section.name} cannot run: {section.lacks()}.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{machine.name()}.jsonl"
    runs = [] if arguments.sections is None else load(path)
    for section in wanted:
        runs = [run for run in runs if run.section != section.name] + measure(section, arguments.rounds)
        save(path, sorted(runs, key=lambda run: names.index(run.section)))
    written = sorted(arguments.out.glob("*.jsonl")) if arguments.sections == [] else [path]
    for found in written:
        if not (kept := load(found)):
            parser.error(
                f"nothing was measured for {found.name} yet: name sections, or leave --sections away."
            )
        print(write_report(found, kept))
    if arguments.out == RESULTS:
        README.write_text(with_figures(README.read_text(), sorted(RESULTS.glob("*.jsonl"))))
    ran = [run for run in runs if run.section in {section.name for section in wanted}]
    unread = missing(ran)
    for claim in unread:
        print(f"no record: {claim.record}", file=sys.stderr)
    return int(any(run.exit_status for run in ran) or bool(unread))


if __name__ == "__main__":
    sys.exit(main())
