"""The benchmark report: records, what is made of them, and how failures are reported."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from matplotlib.figure import Figure

from benchmarks import record as records
from benchmarks.record import Record, number, record
from benchmarks.report import claims, measure, pictures, render
from benchmarks.report.claims import CLAIMS, Claim
from benchmarks.report.measure import Run
from benchmarks.report.sections import SECTIONS, Section

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


def made(name, value=1.0, unit="", low=None, high=None):
    return Record(name=name, value=value, unit=unit, low=low, high=high, machine="m", commit="c")


def run_of(section, *found, status=0):
    about = {"seconds": 61.0, "exit_status": status, "started": "2026-01-01 10:00", "load": 0.1}
    who = {"machine": "made up, 2 cores", "versions": "Python 3", "commit": "c"}
    return Run(section=section, command="python -m made_up", records=list(found), **about, **who)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (56.2, "x", "56.2"),
        (1541.3, "ms", "1,541"),
        (0.00012, "", "0.000120"),
        (3.6e-9, "", "3.6e-09"),
        (99.9996, "%", "99.9996"),
        (1.00005, "x", "1.00005"),
        (0.53, "%", "0.530"),
        (84855.0, "", "84,855"),
        (1.0, "x", "1"),
    ],
)
def test_numbers_keep_three_digits_or_their_distance_from_the_whole(value, unit, text):
    assert number(value, unit) == text


def test_a_record_is_a_line_with_the_median_and_the_spread(tmp_path, monkeypatch):
    monkeypatch.setenv(records.FILE, str(tmp_path / "lines"))
    monkeypatch.setenv(records.MACHINE, "some-cpu")
    records._where.cache_clear()
    record("table", "row", "column", [3.0, 1.0, 2.5], "ms")
    record("table", "row", "count", 7)
    first, second = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    records._where.cache_clear()
    assert first.pop("commit") == second.pop("commit")
    assert first == {
        "name": "table | row | column",
        "value": 2.5,
        "unit": "ms",
        "low": 1,
        "high": 3,
        "machine": "some-cpu",
    }
    assert (second["value"], second["low"], second["high"]) == (7, None, None)


@pytest.mark.parametrize(
    ("row", "values"), [("row", float("nan")), ("row", [1.0, float("inf")]), ("a | b", 1.0)]
)
def test_what_is_no_measurement_is_refused(row, values, monkeypatch, tmp_path):
    monkeypatch.setenv(records.FILE, str(tmp_path / "lines"))
    with pytest.raises(ValueError, match=r"\w"):
        record("table", row, "column", values)
    assert not (tmp_path / "lines").exists()


def test_runs_survive_their_file(tmp_path):
    runs = [
        run_of("packing", made("t | a | b", 2.0, "x", 1.0, 3.0), made("t | a | c")),
        run_of("balance", status=2),
    ]
    measure.save(tmp_path / "runs", runs)
    assert measure.load(tmp_path / "runs") == runs
    assert measure.load(tmp_path / "none") == []


def test_tables_are_made_of_records_with_gaps_where_there_is_none():
    found = [
        made("t | a | time", 2.0, "ms", 1.0, 3.0),
        made("t | b | time", 30.0, "ms"),
        made("t | b | bins", 4.0),
    ]
    (table,) = render.tables([*found])
    assert table.splitlines() == [
        "| t | time (ms) | bins |",
        "| --- | --- | --- |",
        "| a | 2 (1 to 3) |  |",
        "| b | 30 | 4 |",
    ]


def test_the_summary_says_what_holds_what_does_not_and_what_was_not_measured(monkeypatch):
    more = Claim("packing", "speed", "a rival", "t | a | x", ">=", 8)
    less = Claim("packing", "waiting", "a step", "t | a | wait", "<=", 0.3)
    monkeypatch.setattr(
        render, "CLAIMS", [more, less, more._replace(record="t | b | x"), more._replace(section="gpu")]
    )
    runs = [run_of("packing", made("t | a | x", 9.0, "x", 7.0, 10.0), made("t | a | wait", 0.53, "%"))]
    text = render.summary(runs[:])
    where = "[Packing: speed](#packing-speed)"
    assert text.splitlines()[0] == "4 claims; yes: 2, **no**: 1, not measured: 1."
    assert text.splitlines()[4:7] == [
        f"| speed | a rival | >= 8 | **9x** (7 to 10) | yes | 0.1 | {where} |",
        f"| waiting | a step | <= 0.3 | **0.530 %** | **no** | 0.1 | {where} |",
        "| speed | a rival | >= 8 | - | not measured | - | packing |",
    ]


def test_claims_of_sections_that_ran_must_have_records():
    wanted = next(claim for claim in CLAIMS if claim.section == "balance")
    unread = claims.missing([run_of("balance", made(wanted.record))])
    assert wanted not in unread
    assert {claim.section for claim in unread} == {"balance"}
    assert {claim.section for claim in CLAIMS} <= {section.name for section in SECTIONS}


def test_a_failed_command_keeps_its_records_and_its_status():
    program = "from benchmarks.record import record; record('t', 'r', 'c', 7); raise SystemExit(3)"
    run = measure.run("packing", f'{sys.executable} -c "{program}"')
    assert (run.exit_status, [found.value for found in run.records]) == (3, [7.0])


def test_a_command_that_is_not_there_fails():
    assert measure.run("packing", "no-such-program-here").exit_status == 127


def test_a_command_past_its_limit_ends_with_all_it_started(tmp_path):
    command = f"bash -c 'sleep 300 & echo $! > {tmp_path}/child; wait'"
    assert measure.run("packing", command, limit_s=2.0).exit_status == 124
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process dies some time after its signal
    assert not is_alive(child)


def is_alive(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def section_of(name, program, **more):
    command = f'{sys.executable} -c "from benchmarks.record import record; {program}"'
    return Section(name=name, title=name, method="Made up.", commands=(command,), **more)


@pytest.fixture
def report_of(monkeypatch, tmp_path):
    """Runs `python -m benchmarks.report` over made-up sections, into a folder of its own."""
    main = importlib.import_module("benchmarks.report.__main__")
    monkeypatch.chdir(ROOT)

    def run(sections, *arguments):
        for module in (main, render):
            monkeypatch.setattr(module, "SECTIONS", sections)
        monkeypatch.setattr(render, "CLAIMS", [])
        monkeypatch.setattr(claims, "CLAIMS", [Claim("two", "it", "that", "t | r | c", ">=", 1)])
        monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path), *arguments])
        status = main.main()
        return status, next(tmp_path.glob("*.md")).read_text()

    return run


def test_sections_named_are_measured_and_the_others_kept(report_of):
    two = section_of("two", "record('t', 'r', 'c', 22)")
    assert report_of([section_of("one", "record('t', 'r', 'd', 11)"), two])[0] == 0
    status, text = report_of([section_of("one", "record('t', 'r', 'd', 33)"), two], "--sections", "one")
    assert status == 0
    assert "| r | 33 |" in text
    assert "| r | 22 |" in text
    assert "| r | 11 |" not in text


@pytest.mark.parametrize(
    "program", ["record('t', 'r', 'c', 1); raise SystemExit(5)", "record('t', 'r', 'other', 1)"]
)
def test_the_report_ends_with_an_error_after_writing_where_one_failed_or_a_claim_has_no_record(
    report_of, program
):
    status, text = report_of([section_of("two", program)])
    assert status == 1
    assert ("**exit status 5**" in text) == ("SystemExit" in program)
    assert "| r | 1 |" in text


def test_a_section_that_lacks_something_is_left_out_with_the_reason(report_of, capsys):
    sections = [section_of("one", "1"), section_of("gpu", "1", lacks=lambda: "no GPU here")]
    assert "| not measured | gpu (no GPU here) |" in report_of(sections)[1]
    with pytest.raises(SystemExit):
        report_of(sections, "--sections", "gpu")
    assert "gpu cannot run: no GPU here." in capsys.readouterr().err


def test_bars_are_sorted_ours_is_blue_and_far_values_get_a_logarithmic_axis():
    axes = Figure().subplots()
    pictures.bars(axes, [made("t | trl | time", 300.0, "ms"), made("t | multipack | time", 2.0, "ms")])
    assert [bar.get_width() for bar in axes.patches] == [2, 300]
    assert [bar.get_facecolor()[2] > 0.8 for bar in axes.patches] == [True, False]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "ms, logarithmic axis")


def test_lines_end_where_a_rival_was_left_out():
    axes = Figure().subplots()
    sizes = [made(f"t | {size} | multipack auto", 20.0, "ns") for size in ("10,000", "100,000")]
    pictures.lines(axes, [*sizes, made("t | 10,000 | trl bfd", 500.0, "ns")])
    ours, rival = axes.get_lines()
    assert (list(ours.get_xdata()), list(rival.get_xdata())) == ([10_000, 100_000], [10_000])
    assert (ours.get_linestyle(), rival.get_linestyle()) == ("-", "--")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_committed_report_is_that_of_its_records(path, tmp_path):
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    runs = measure.load(copy)
    assert {record.machine for run in runs for record in run.records} == {path.stem}
    assert render.write_report(copy, runs).read_text() == path.with_suffix(".md").read_text()
    shown = {file.name for file in tmp_path.glob("*.png")}
    assert shown == {file.name for file in path.parent.glob(f"{path.stem}_*.png")}
    assert 0 < len(shown) <= 5


def test_the_figures_of_the_readme_are_those_of_the_records():
    readme = (ROOT / "README.md").read_text()
    assert render.with_figures(readme, RESULTS) == readme
    with pytest.raises(ValueError, match="README lacks"):
        render.with_figures("# A README without the markers", RESULTS)
