"""Run every benchmark and write one report, meant for under 15 minutes on 2 free cores.

    python -m benchmarks.report                                # all sections
    python -m benchmarks.report --sections packing balance     # these; the others as they were measured last
    python -m benchmarks.report --sections                     # measure nothing, write the report again

Each benchmark is a process of its own, with its own pinning. What was measured is kept in runs/report/, and the report goes to
benchmarks/results/ with its plots beside it. Leave the machine alone meanwhile: the load before each section is in the report.
Ends with an error, after the report has been written, where a benchmark failed or a claim found no value in what was printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report.measure import load, measure, save
from benchmarks.report.sections import SECTIONS
from benchmarks.report.write import write_report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sections",
        nargs="*",
        choices=[section.name for section in SECTIONS],
        default=None,
        help="measure only these; default: all that the machine can",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of growth and throughput; the others fix theirs"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the report")
    arguments = parser.parse_args()
    possible = [section for section in SECTIONS if not section.lacks()]
    wanted = possible
    if arguments.sections is not None:
        wanted = [section for section in SECTIONS if section.name in arguments.sections]
    for section in wanted:
        if section not in possible:
            parser.error(f"{section.name} cannot run: {section.lacks()}.")
    failed = False
    for section in wanted:
        record = measure(section, arguments.rounds, lambda line: print(line, flush=True))
        save(section.name, record)
        failed |= any(part.exit_status for part in record.records)
    kept = wanted if arguments.sections is None else SECTIONS
    measured = [(section, found) for section in kept if (found := load(section.name))]
    if not measured:
        parser.error("nothing was measured yet: name sections, or leave --sections away.")
    each = "" if arguments.sections is None else " --sections NAME"
    command = f"python -m benchmarks.report --rounds {arguments.rounds}{each}"
    path, unread = write_report(arguments.out, measured, command)
    for claim in unread:
        print(f"no value: {claim}", file=sys.stderr)
    print(path)
    return int(failed or bool(unread))


if __name__ == "__main__":
    sys.exit(main())
