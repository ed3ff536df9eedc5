"""`multipack inspect` and `multipack bench`: every kind of file, the numbers, and what a person is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from helpers import SHARED

from multipack.cli import main
from multipack.cli.inspection import Question, inspect
from multipack.cli.scan import scan

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]  # 31 tokens
ROWS = [list(range(n)) for n in LENGTHS]


def lengths_of(*paths: Path, column: str | None = None, split: str | None = None) -> list[int]:
    found = scan(
        list(paths), column=column, split=split, tokenise=None, progress=lambda name, done, total: None
    )
    return found.lengths.tolist()


def write_lines(path: Path, rows: list[Any]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def written(folder: Path, kind: str) -> Path:
    """The rows above in a file of this kind."""
    table = pa.table({"input_ids": ROWS, "other": LENGTHS})
    path = folder / f"rows.{kind}"
    if kind == "npy":
        np.save(path, np.array(LENGTHS, np.uint16))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    elif kind == "arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif kind == "feather":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif kind.startswith("jsonl"):
        write_lines(path, table.to_pylist())
    else:
        Dataset(table).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["npy", "parquet", "arrow", "feather", "jsonl", "jsonl.gz", "saved"])
def test_every_kind_of_file_gives_the_lengths(tmp_path: Path, kind: str) -> None:
    assert lengths_of(written(tmp_path, kind)) == LENGTHS


def test_a_saved_selection_has_the_lengths_of_its_rows(tmp_path: Path) -> None:
    Dataset.from_dict({"input_ids": ROWS}).select([5, 0, 5]).save_to_disk(tmp_path / "selected")
    assert lengths_of(tmp_path / "selected") == [9, 3, 9]


def test_a_dict_of_splits_has_its_training_split_or_the_one_asked_for(tmp_path: Path) -> None:
    splits = {
        "train": Dataset.from_dict({"input_ids": ROWS}),
        "test": Dataset.from_dict({"input_ids": [[7]]}),
    }
    DatasetDict(splits).save_to_disk(tmp_path / "both")
    assert lengths_of(tmp_path / "both") == LENGTHS
    assert lengths_of(tmp_path / "both", split="test") == [1]
    with pytest.raises(ValueError, match="splits train, test, and no 'dev'"):
        lengths_of(tmp_path / "both", split="dev")


def test_a_folder_of_shards_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, rows in (("b", ROWS[3:]), ("a", ROWS[:3])):
        pq.write_table(pa.table({"input_ids": rows}), tmp_path / f"{name}.parquet")
    assert lengths_of(tmp_path) == LENGTHS
    assert lengths_of(tmp_path / "a.parquet", tmp_path / "b.parquet") == LENGTHS


def test_rows_that_are_all_empty_have_no_tokens(tmp_path: Path) -> None:
    assert lengths_of(write_lines(tmp_path / "rows.jsonl", [{"input_ids": []}] * 2)) == [0, 0]


def test_json_beside_other_data_describes_them(tmp_path: Path) -> None:
    written(tmp_path, "arrow")
    (tmp_path / "meta.json").write_text('{"version": 1}')
    assert lengths_of(tmp_path) == LENGTHS


def test_a_column_of_numbers_holds_the_lengths_themselves(tmp_path: Path) -> None:
    assert lengths_of(written(tmp_path, "parquet"), column="other") == LENGTHS


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "hello"}], "holds text, and packing goes by tokens: .*--tokenizer"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], "holds text"),
        ([{"title": "a"}], r"The columns \(title\) fit no format"),
        ([{"input_ids": [1]}, {"other": [2]}], "row 1: input_ids is None, not a list of tokens"),
        ([{"input_ids": [1]}, {"input_ids": None}], "row 1: input_ids is None"),
        ([{"input_ids": [1]}, {"input_ids": "a"}], "row 1: input_ids is 'a', not a list of numbers"),
        ([{"input_ids": [[1, 2], [3]]}], r"row 0: token 0 of input_ids is \[1, 2\], not a whole number"),
        ([{"input_ids": ["a", "b"]}], "row 0: token 0 of input_ids is 'a'"),
        ([{"input_ids": []}, {"input_ids": []}, {"input_ids": 3}], "row 2: input_ids is '3', not a list"),
        ([{"length": -3}], "row 0 has the length -3"),
        ([{"input_ids": [1]}, [2]], "line 2 is not an object"),
        ([], "holds no rows"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lengths_of(write_lines(tmp_path / "rows.jsonl", rows))


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.xml").write_text("<a/>")
    (tmp_path / "broken.jsonl").write_text('{"input_ids": [1]}\n{"input')
    np.save(tmp_path / "table.npy", np.zeros((2, 2), np.int64))
    for name, message in (
        ("rows.xml", "not a kind of file"),
        ("broken.jsonl", "line 2 is not JSON"),
        ("table.npy", r"shape \(2, 2\)"),
        ("missing.npy", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            lengths_of(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file that ends with"):
        lengths_of(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["npy", "parquet", "arrow", "feather", "jsonl.gz"])
@pytest.mark.parametrize("size", [0, 40, -20])
def test_files_that_are_cut_short_are_named(tmp_path: Path, kind: str, size: int) -> None:
    path = written(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"rows\.{kind}.*(whole|holds no rows)"):
        lengths_of(path)


def test_damaged_folders_of_save_to_disk_are_named(tmp_path: Path) -> None:
    saved = written(tmp_path, "saved")
    next(saved.glob("*.arrow")).write_bytes(b"")
    with pytest.raises(ValueError, match=r"rows\.saved cannot be read"):
        lengths_of(saved)
    (saved / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"rows\.saved cannot be read"):
        lengths_of(saved)
    (saved / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match="does not list the splits"):
        lengths_of(saved)


def test_a_saved_data_set_without_rows_says_so(tmp_path: Path) -> None:
    Dataset.from_dict({"input_ids": []}).save_to_disk(tmp_path / "none")
    with pytest.raises(ValueError, match="none holds no rows"):
        lengths_of(tmp_path / "none")


def test_a_split_of_what_has_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no splits"):
        lengths_of(written(tmp_path, "saved"), split="dev")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_of_rows_is_read_as_rows(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"input_ids": row} for row in ROWS], indent=indent))
    assert lengths_of(tmp_path / "rows.json") == LENGTHS
    (tmp_path / "numbers.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="something other than rows"):
        lengths_of(tmp_path / "numbers.json")


@pytest.mark.parametrize("length", [-1, 2**62, 2**63 + 5])
def test_numbers_that_count_no_tokens_are_named(tmp_path: Path, length: int) -> None:
    np.save(tmp_path / "odd.npy", np.array([3, length], np.uint64 if length > 2**62 else np.int64))
    with pytest.raises(ValueError, match=rf"odd\.npy: row 1 has the length {length}, outside 0"):
        lengths_of(tmp_path / "odd.npy")


def test_numbers_of_a_small_data_set_worked_out_by_hand() -> None:
    found = inspect(
        np.array([*LENGTHS, 0, 20]), Question(capacity=10, padded_rows=4, hidden_size=10**9, ranks=2)
    )
    rows, bins, steps, padded = found.rows, found.bins, found.steps, found.padded
    assert (rows.rows, rows.tokens, rows.empty, rows.overlong, rows.lost_tokens) == (10, 51, 1, 1, 20)
    assert (rows.longest, rows.median) == (20, 3.5)
    # 31 tokens need four bins of ten, and 9+1, 6+4, 5+3+2, 1 are four.
    assert (bins.sequences, bins.bins, bins.at_least) == (8, 4, 4)
    assert bins.efficiency == bins.best_efficiency == 31 / 40
    assert (steps.micro_steps, steps.optimizer_steps, steps.tokens_per_optimizer_step) == (2, 2, 15.5)
    # Sorted: 1 1 2 3 in four columns of 3, and 4 5 6 9 in four of 9.
    assert padded.sorted_padding_share == pytest.approx(1 - 31 / 48)
    # Random: the 9 is in one of two batches, whose other one is at least 3 and at most 6 wide.
    assert 1 - 31 / (36 + 24) >= padded.padding_share >= 1 - 31 / (36 + 12)
    # With a model so wide attention costs nothing: compute goes by slots.
    assert padded.speed_up == pytest.approx(1 / (1 - padded.padding_share), rel=1e-6)


def test_attention_counts_in_the_speed_up() -> None:
    # One batch of lengths 2 and 6: 12 slots, attention over 2 * 6^2; packed 8 slots and 2^2 + 6^2.
    # hidden_size 1: divide by 12.
    found = inspect(np.array([2, 6]), Question(capacity=8, padded_rows=2, hidden_size=1))
    assert found.padded.speed_up == pytest.approx((12 + 72 / 12) / (8 + 40 / 12))


def test_balance_worked_out_by_hand() -> None:
    # Rows of 8, 8, 8 and 4 tokens fill a bin each, and one optimizer step of two ranks. Sums are 16 and 12 at
    # best, 14 on average; meeting twice, ranks wait for 8 and 8, also at best: 16.
    question = Question(capacity=8, ranks=2, accumulate=2, method="next_fit", hidden_size=10**9)
    found = {b.mode: b for b in inspect(np.array([8, 8, 8, 4]), question).balance}
    assert found["step"].once_a_step == pytest.approx(2 / 14)
    assert found["micro_step"].every_micro_step == pytest.approx(2 / 14)
    assert all(b.once_a_step <= b.every_micro_step + 1e-12 for b in found.values())


def test_a_last_optimizer_step_that_is_not_full_counts() -> None:
    # Three bins of 10 on one rank, two a step.
    steps = inspect(np.full(3, 10), Question(capacity=10, accumulate=2)).steps
    assert (steps.micro_steps, steps.optimizer_steps, steps.tokens_per_optimizer_step) == (3, 2, 15.0)


def test_an_interrupt_ends_quietly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multipack.cli.commands.scan", interrupted)
    assert main(["inspect", str(tmp_path), "--capacity", "8"]) == 130
    assert capsys.readouterr() == ("", "")


def test_one_rank_waits_for_nobody() -> None:
    assert inspect(np.array(LENGTHS), Question(capacity=10)).balance == ()


@pytest.mark.parametrize(("lengths", "message"), [([0, 0], "all 2 rows are empty"), ([50, 60], "--overlong")])
def test_nothing_to_pack_is_an_error(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(np.array(lengths), Question(capacity=10))


def test_inspect_prints_tables_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = written(tmp_path, "jsonl.gz"), tmp_path / "picture.png"
    assert main(["inspect", str(path), "--capacity", "8", "--ranks", "2", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    for part in (
        "rows.jsonl.gz",
        "rows above 8 tokens",
        "slots that hold a token",
        "expected speed-up",
        "step",
    ):
        assert part in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_pictures_of_one_rank_and_of_many_rows(tmp_path: Path, ranks: str) -> None:
    np.save(tmp_path / "one.npy", np.full(500, 7))
    picture = tmp_path / "one.png"
    arguments = [
        "--capacity",
        "1024",
        "--ranks",
        ranks,
        "--plot",
        str(picture),
        "--json",
        "--bins-per-batch",
        "2",
    ]
    assert main(["inspect", str(tmp_path / "one.npy"), *arguments]) == 0
    assert picture.stat().st_size > 10_000


def test_inspect_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "npy")
    assert main(["inspect", str(path), "--capacity", "10", "--ranks", "2", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["bins"]["bins"] == 4
    assert numbers["steps"]["micro_steps"] == 2
    assert [balance["mode"] for balance in numbers["balance"]] == ["none", "micro_step", "step"]


@pytest.mark.parametrize("kind", ["npy", "parquet", "saved"])
def test_bench_measures_each_number_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = written(tmp_path, kind)
    arguments = ["--capacity", "10", "--seconds", "0.05", "--step-ms", "20", "--workers", "0", "1"]
    assert main(["bench", str(path), *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert ("random tokens" in answer["tokens"]) == (kind == "npy")
    assert [row["workers"] for row in answer["measured"]] == [0, 1]
    for row in answer["measured"]:
        assert row["batches_per_second"] > 0
        assert row["shortest_step_ms"] == pytest.approx(1e3 / row["batches_per_second"])
        assert 0 <= row["wait_share"] < 0.5  # flat out, without the step, waiting is nearly all there is


@pytest.mark.parametrize("width", [50, 78, 79, 80])
def test_no_letter_of_a_table_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    np.save(tmp_path / "rows.npy", np.full(1_700, 100))
    assert main(["inspect", str(tmp_path / "rows.npy"), "--capacity", "1000"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    packed = said[said.index("Packed") : said.index("An epoch")].splitlines()[1:]
    place = packed[0].index("no packing")
    notes = " ".join(line[place:].strip() for line in packed)
    assert notes.startswith("no packing needs fewer than 170 100.000% at best")


def test_bench_counts_the_first_batch_of_each_epoch_with_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An epoch of one batch has no time between its batches; making it takes more than 10 us all the same.
    path = written(tmp_path, "npy")
    arguments = ["--capacity", "1000", "--seconds", "0.05", "--step-ms", "1", "--workers", "0", "--json"]
    assert main(["bench", str(path), *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)["measured"]
    assert 1 < row["batches_per_second"] < 1e5


def test_bench_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "npy")
    assert main(["bench", str(path), "--capacity", "10", "--seconds", "0.02", "--workers", "1"]) == 0
    assert "first batch" in capsys.readouterr().out


def test_errors_are_one_line_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "missing.npy"), "--capacity", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("multipack: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "--capacity: 0 is not a whole number, 1 or more"),
        (["--capacity", "4e3"], "--capacity: 4e3 is not a whole number, 1 or more"),
        (["--capacity", "8", "--ranks", "-1"], "--ranks: -1 is not a whole number, 1 or more"),
        (["--capacity", "8", "--seed", "-1"], "--seed: -1 is not a whole number, 0 or more"),
        (["--capacity", "8", "--plot", "out"], "--plot: out does not end with .png"),
        (["--capacity", "8", "--plot", "missing/out.png"], "--plot: the folder missing does not exist"),
        ([], "required: --capacity"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_times_that_never_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", str(tmp_path), "--capacity", "8", f"--seconds={seconds}"])
    assert f"{seconds} is not a time above 0" in capsys.readouterr().err


def test_missing_packages_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multipack.cli.commands.find_spec", lambda name: None)
    path = str(written(tmp_path, "npy"))
    assert main(["inspect", path, "--capacity", "10"]) == 2
    assert "pip install rich or ask for --json" in capsys.readouterr().err
    assert main(["inspect", path, "--capacity", "10", "--json", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert main(["inspect", path, "--capacity", "10", "--json"]) == 0


@pytest.mark.shared
@pytest.mark.parametrize(("name", "more"), [("peps", 1), ("oasst1_en_val_threads", 21)])
def test_text_and_conversations_are_counted_by_the_tokenizer(tmp_path: Path, name: str, more: int) -> None:
    # A document gets an end token, and the chat template puts a system message of 21 tokens before these
    # conversations; the stored lengths were counted without both.
    from multipack.cli.scan import tokenizer_of

    with gzip.open(SHARED / f"data/text/{name}.jsonl.gz", "rt") as lines:
        rows = [json.loads(next(lines)) for _ in range(20)]
    found = scan(
        [write_lines(tmp_path / "some.jsonl", rows)],
        column=None,
        split=None,
        tokenise=tokenizer_of(SHARED / "data/tokenizers/smollm2"),
        progress=lambda name, done, total: None,
    )
    stored = np.load(SHARED / f"data/lengths/{name}.npy")[:20].astype(np.int64)
    assert found.lengths.tolist() == (stored + more).tolist()
    assert found.made_up
