"""Every public bug report in reports.txt is a marker on the test of its behaviour:
@pytest.mark.report("owner/name#123")."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def marked() -> list[str]:
    """Reports that tests are marked with; a report may need several tests."""
    return [
        ast.literal_eval(name)
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.report"
        for name in call.args
    ]


def test_every_report_is_a_marker_on_a_test_and_every_marker_names_a_report() -> None:
    reports = (TESTS / "reports.txt").read_text(encoding="utf-8").split()
    assert len(reports) == len(set(reports)) == 106
    assert set(reports) <= set(marked())
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in marked())
