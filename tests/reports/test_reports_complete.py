"""Every public report is a test, or stands in the table of README.md with the reason why it cannot be one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def names_of_tests() -> list[str]:
    """Test functions of the files beside this one."""
    return [
        node.name
        for path in sorted(HERE.glob("test_reports_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def name_of_report(report: str) -> str:
    """`owner/Some-Repository.jl#12` is `some_repository_jl_12`."""
    repository, number = report.split("/")[1].split("#")
    return re.sub(r"\W", "_", repository).lower() + "_" + number


def test_every_report_has_a_test_or_a_reason() -> None:
    reports = (HERE / "ids.txt").read_text(encoding="utf-8").split()
    assert len(reports) == len(set(reports)) == 106
    names = {name_of_report(report): report for report in reports}
    assert len(names) == 106
    tests = names_of_tests()
    excused = re.findall(
        r"^\| ([\w.-]+/[\w.-]+#\d+) \| .{20,} \|$", (HERE / "README.md").read_text(), re.MULTILINE
    )
    for name, report in names.items():
        found = [test for test in tests if re.match(rf"test_{name}(_|$)", test)]
        assert len(found) + (report in excused) == 1, f"{report}: {found or 'no test'}"
    assert set(excused) <= set(reports)
