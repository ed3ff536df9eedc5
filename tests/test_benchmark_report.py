"""The benchmark report: what is read out of tables, what a claim says without a value, and how failures are reported."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import time

import psutil
import pytest
from matplotlib.figure import Figure

from benchmarks.report import measure, plots, write
from benchmarks.report.claim import Claim, at_least, at_most, cells, column, of_engine, pattern
from benchmarks.report.claims import CLAIMS
from benchmarks.report.measure import Record, SectionRecord
from benchmarks.report.sections import SECTIONS, Command, Section
from benchmarks.report.tables import (
    Table,
    benchmark_groups,
    find_table,
    markdown_table,
    number,
    separated,
    tables_of,
)

BALANCE = """### Time of the slowest rank over the mean
| ranks, accumulate | in turn | sorted | lpt | lpt, ms a step |
|---|---|---|---|---|
| 64, 16 | 1.4535 | 1.0158 | 1.00605 | 0.21 |
| 64, 4 | 1.4535 | 1.0936 | 1.06249 | 0.12 |
"""


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("**58** (25 to 60)", 58),
        ("1,234,567 rows", 1234567),
        ("1.23e+03", 1230),
        ("4.0e-09 apart", 4e-9),
        (".090", 0.09),
        ("+1.17", 1.17),
        ("-0.5%", -0.5),
    ],
)
def test_number_is_the_first_one_of_a_cell(cell, value):
    assert number(cell) == pytest.approx(value)


def test_number_of_a_rival_left_out_is_nan():
    assert math.isnan(number("-"))


def test_tables_have_the_heading_above_them():
    first, second = tables_of(f"## A\n\n{BALANCE}\ntext\n| a |\n|---|\n| 1 |\n")
    assert (first.heading, second.heading) == (
        "Time of the slowest rank over the mean",
        "Time of the slowest rank over the mean",
    )
    assert first.columns == ["ranks, accumulate", "in turn", "micro_step", "step", "lpt, ms a step"]
    assert [row[0] for row in first.rows] == ["64, 16", "64, 4"]
    assert second.rows == [["1"]]


def test_a_column_is_found_by_its_whole_name_first():
    table = Table("", ["row", "lpt, ms a step", "step"], [["a", "1", "2"]])
    assert table.column("step") == ["2"]
    assert table.column("ms a") == ["1"]
    with pytest.raises(ValueError, match="no column 'stream'"):
        table.column("stream")
    with pytest.raises(ValueError, match="no row 'b'"):
        table.cell("b", "step")
    with pytest.raises(ValueError, match="no table about 'stream'"):
        find_table(BALANCE, "stream")


def test_tables_get_empty_lines_around_them():
    assert separated("text\n| a |\n|---|\n| 1 |\nmore").splitlines() == [
        "text",
        "",
        "| a |",
        "|---|",
        "| 1 |",
        "",
        "more",
    ]


def benchmark_entry(name, median):
    stats = {"median": median, "min": median / 2, "max": 2 * median, "rounds": 5}
    return {"group": "pack", "name": "test", "params": {"name": name}, "stats": stats, "extra_info": {}}


def test_groups_are_sorted_and_compared_with_ours():
    (text,) = benchmark_groups([benchmark_entry("trl", 0.03), benchmark_entry("multipack auto", 0.002)])
    (table,) = tables_of(text)
    assert table.columns == ["pack", "x multipack auto", "median ms", "smallest to largest", "rounds"]
    assert table.rows == [
        ["multipack auto", "1", "2", "1 to 4", "5"],
        ["trl", "**15**", "30", "15 to 60", "5"],
    ]


def test_a_group_whose_own_entry_failed_has_no_ratios():
    (text,) = benchmark_groups([benchmark_entry("trl", 0.03)])
    assert tables_of(text)[0].rows[0][:2] == ["trl", "-"]


def test_bounds():
    assert at_least(8, 4).holds([8, 5])
    assert not at_least(8, 4).holds([9, 3.9])
    assert at_most(1).holds([1])
    assert not at_most(1).holds([1.01])
    assert not at_most(1).holds([float("nan")])


@pytest.mark.parametrize(
    "read",
    [
        pattern(r"took (\d+) s"),
        cells("step", "step", "128, 16"),
        cells("step", "stream", "64, 16"),
        column("step", "micro_step"),  # two values for one limit
        column("none", "none"),
        lambda text: [float("nan")],
        of_engine(0, "zero2", "padded", "data wait"),
    ],
)
def test_a_claim_that_finds_no_value_says_so(read):
    with pytest.raises(ValueError, match=r"\w"):
        Claim("a claim", "balance", at_most(1), "{}", read).values(BALANCE)


def test_every_claim_belongs_to_a_section_and_has_a_format():
    assert {claim.section for claim in CLAIMS} <= {section.name for section in SECTIONS}
    for claim in CLAIMS:
        assert re.search(r"\d", claim.unit.format(1.0))


def record_of(text, status=0):
    return SectionRecord([Record("python -m made_up", text, 1.0, status)], "2026-01-01 10:00", "abc", 0.1)


def section_named(name):
    return next(section for section in SECTIONS if section.name == name)


def test_report_says_what_holds_what_does_not_and_what_has_no_value(tmp_path):
    parts = [
        (section_named("packing"), record_of("it broke", status=3)),
        (section_named("balance"), record_of(BALANCE)),
    ]
    path, unread = write.write_report(tmp_path, parts, "python -m benchmarks.report")
    text = path.read_text()
    summary = {row[0] + row[5]: row for row in find_table(text, "holds").rows}
    assert summary[next(key for key in summary if key.startswith("balance, heavy"))][1:4] == [
        "<= 1.02",
        "**1.0158**",
        "yes",
    ]
    assert summary["the same, `step`[Balance between ranks](#balance-between-ranks)"][1:4] == [
        "<= 1.005",
        "**1.00605**",
        "**no**",
    ]
    assert len(summary) == len(CLAIMS)
    packing = [claim.what for claim in CLAIMS if claim.section == "packing"]
    assert packing
    assert unread == packing
    assert text.count("**no value** |") == len(packing)
    assert text.count("**not measured** |") == len(CLAIMS) - len(packing) - 2
    assert "**exit status 3**" in text
    assert "No picture of 'Packing 1,000,000 sequences': no table about" in text
    assert not list(tmp_path.glob("*.png"))


def test_pictures_lie_beside_the_report_and_old_ones_go(tmp_path):
    table = markdown_table(["first batch of 10 rows", "median ms"], [["multipack", "2"], ["trl", "300"]])
    parts = [(section_named("start"), record_of(table))]
    path, _ = write.write_report(tmp_path, parts, "python")
    old = path.with_name(f"{path.stem}_gone.png")
    old.touch()
    path, _ = write.write_report(tmp_path, parts, "python")
    assert not old.exists()
    (picture,) = tmp_path.glob("*.png")
    assert f"]({picture.name})" in path.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_failed_command_keeps_what_it_said():
    record = measure.run(Command("python -c 'print(7); raise SystemExit(3)'"), 2)
    assert (record.markdown, record.exit_status) == ("7", 3)


def test_a_command_that_is_not_there_fails():
    assert measure.run(Command("no-such-program-here"), 2).exit_status == 127


def test_a_command_past_its_limit_ends_with_all_it_started():
    record = measure.run(Command("bash -c 'sleep 300 & echo $!; wait'"), 2, limit_s=2.0)
    assert record.exit_status == 124
    child = int(record.markdown)
    deadline = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process dies some time after its signal
    assert not is_alive(child)


def is_alive(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_rounds_and_core_are_in_the_command():
    command = Command("python -m benchmarks.growth --rounds {rounds}", is_pinned=True)
    assert command.text(3, 5) == "taskset -c 3 python -m benchmarks.growth --rounds 5"


def made_up(name, program, **more):
    return Section(
        name=name, title=name, method="Made up.", commands=(Command(f"python -c '{program}'"),), **more
    )


@pytest.fixture
def report_of(monkeypatch, tmp_path):
    """Runs `python -m benchmarks.report` over some sections, in an empty folder."""
    main = importlib.import_module("benchmarks.report.__main__")

    def run(sections, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(main, "SECTIONS", sections)
        monkeypatch.setattr(write, "SECTIONS", sections)
        monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path), *arguments])
        status = main.main()
        return status, next(tmp_path.glob("*.md")).read_text()

    return run


def test_the_report_ends_with_an_error_after_writing_the_rest(report_of):
    status, text = report_of([made_up("one", "raise SystemExit(5)"), made_up("two", "print(22)")])
    assert status == 1
    assert "**exit status 5**" in text
    assert "## two" in text
    assert "\n22\n" in text


def test_the_report_ends_well(report_of):
    assert report_of([made_up("two", "print(22)")])[0] == 0


def test_the_report_ends_with_an_error_where_a_claim_has_no_value(report_of, monkeypatch):
    claim = Claim("it is quick", "two", at_most(1), "{:.1f} s", pattern(r"took (\d+) s"))
    monkeypatch.setattr(write, "CLAIMS", [claim])
    status, text = report_of([made_up("two", "print(22)")])
    assert status == 1
    assert "1 claims; **no value**: 1." in text


def test_a_section_that_lacks_something_is_left_out_with_the_reason(report_of, capsys):
    sections = [made_up("two", "print(22)"), made_up("gpu", "print(1)", lacks=lambda: "no GPU here")]
    status, text = report_of(sections)
    assert status == 0
    assert "| not measured | gpu (no GPU here) |" in text
    with pytest.raises(SystemExit):
        report_of(sections, "--sections", "gpu")
    assert "gpu cannot run: no GPU here." in capsys.readouterr().err


def test_sections_named_are_measured_and_the_others_kept(report_of):
    sections = [made_up("one", "print(11)"), made_up("two", "print(22)")]
    report_of(sections)
    _, text = report_of([made_up("one", "print(33)"), sections[1]], "--sections", "one")
    assert "\n33\n" in text
    assert "\n22\n" in text
    assert "\n11\n" not in text


def test_records_survive_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RECORDS", tmp_path)
    record = record_of(BALANCE, status=2)
    measure.save("balance", record)
    assert measure.load("balance") == record
    assert json.loads((tmp_path / "balance.json").read_text())["commit"] == "abc"
    assert measure.load("planning") is None


def axes_of(draw, table):
    axes = Figure().subplots()
    draw(axes, table)
    return axes


def test_bars_are_sorted_ours_is_blue_and_far_values_get_a_logarithmic_axis():
    rows = [["trl", "300"], ["multipack", "2"], ["copy", "1"]]
    axes = axes_of(plots.bars("median"), Table("", ["name", "median ms"], rows))
    assert [bar.get_width() for bar in axes.patches] == [1, 2, 300]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["copy", "multipack", "trl"]
    assert [bar.get_facecolor()[2] > 0.8 for bar in axes.patches] == [False, True, False]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "median ms, logarithmic axis")
    near = axes_of(plots.bars("median"), Table("", ["name", "median ms"], rows[1:]))
    assert (near.get_xscale(), near.get_xlabel()) == ("linear", "median ms")


def test_pairs_stand_above_each_other():
    table = Table("", ["family", "auto: bins", "first-fit"], [["u", "52", "192"], ["t", "89", "881"]])
    axes = axes_of(plots.pairs("auto", "first-fit"), table)
    assert [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in axes.patches] == [
        pytest.approx(place) for place in ((-0.2, 52), (0.8, 89), (0.2, 192), (1.2, 881))
    ]


def test_lines_leave_a_gap_where_a_rival_was_left_out():
    rows = [["10,000", "21", "500"], ["100,000", "20", "-"]]
    table = Table("", ["sequences", "multipack auto", "trl bfd"], rows)
    ours, rival = axes_of(plots.lines("sequences", "ns"), table).get_lines()
    assert list(ours.get_xdata()) == [10_000, 100_000]
    assert math.isnan(rival.get_ydata()[1])
    assert (ours.get_linestyle(), rival.get_linestyle()) == ("-", "--")


def test_parts_stand_beside_each_other():
    table = Table("", ["beside", "work ms", "wait ms"], [["no loader", "20", "1"], ["trl", "20", "5"]])
    bars = axes_of(plots.parts(("work ms", "wait ms"), "ms"), table).patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 20), (0, 20), (20, 1), (20, 5)]


def test_clusters_have_a_bar_for_each_member():
    rows = [["zero2", "padded", "5"], ["zero2", "multipack", "60"], ["zero3", "multipack", "50"]]
    axes = axes_of(
        plots.clusters("engine", "loader", "samples/s", "samples/s"),
        Table("", ["engine", "loader", "samples/s"], rows),
    )
    assert [bar.get_height() for bar in axes.patches if not math.isnan(bar.get_height())] == [5, 60, 50]
