"""Text to a token cache that is made once, found again, and never half there."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from multipack.train.config import DatasetConfig, TrainConfig
from multipack.train.data import prepare
from multipack.train.data.builtin import byte_tokenizer
from multipack.train.data.prepare import prepare_data, split_rows

ROWS = [{"text": word * times} for times, word in enumerate(("ab", "c", "défg", "h", "ij", "klm"), 1)]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return run(tmp_path, data=str(write(tmp_path / "rows.jsonl", ROWS)))


def run(folder: Path, **values: Any) -> TrainConfig:
    return TrainConfig(
        dataset_prepared_path=str(folder / "prepared"), output_dir=str(folder / "run"), **values
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def texts(config: TrainConfig) -> list[str]:
    tokens = prepare_data(config).train
    return [byte_tokenizer().decode(tokens[row]["input_ids"]) for row in range(len(tokens))]


EXPECTED = [row["text"] + "<|end|>" for row in ROWS]


def test_rows_become_tokens_in_their_order(config: TrainConfig) -> None:
    prepared = prepare_data(config)
    assert texts(config) == EXPECTED
    assert prepared.validation is None
    assert prepared.train.lengths.tolist() == [
        len(text.removesuffix("<|end|>").encode()) + 1 for text in EXPECTED
    ]
    meta = json.loads((prepared.folders[0] / "meta.json").read_text(encoding="utf-8"))
    assert (meta["rows"], meta["tokens"], meta["targets"]) == (
        6,
        sum(prepared.train.lengths),
        sum(prepared.train.lengths),
    )
    assert (
        str(prepared)
        == f"training 6 rows, {meta['tokens']} tokens, the longest {max(prepared.train.lengths)} | tokens in {prepared.folders[0]}"
    )


def jsonl(folder: Path) -> str:
    return str(write(folder / "data.jsonl", ROWS))


def jsonl_gz(folder: Path) -> str:
    return str(write(folder / "data.jsonl.gz", ROWS))


def json_list(folder: Path) -> str:
    (folder / "data.json").write_text(json.dumps(ROWS), encoding="utf-8")
    return str(folder / "data.json")


def parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "data.parquet")
    return str(folder / "data.parquet")


def arrow(folder: Path) -> str:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(folder / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    return str(folder / "data.arrow")


def saved(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved")


def saved_splits(folder: Path) -> str:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(folder / "splits")
    return str(folder / "splits")


def file_folder(folder: Path) -> str:
    (folder / "files").mkdir()
    write(folder / "files" / "train-a.jsonl", ROWS[:4])
    write(folder / "files" / "train-b.jsonl", ROWS[4:])
    write(folder / "files" / "test.jsonl", ROWS[:1])
    return str(folder / "files")


@pytest.mark.parametrize(
    "make", [jsonl, jsonl_gz, json_list, parquet, arrow, saved, saved_splits, file_folder]
)
def test_every_kind_of_source_gives_the_same_rows(make: Any, tmp_path: Path) -> None:
    assert texts(run(tmp_path, data=make(tmp_path))) == EXPECTED


def test_a_split_is_chosen_by_name_or_slice(tmp_path: Path) -> None:
    named = DatasetConfig(path=saved_splits(tmp_path), split="test")
    assert texts(run(tmp_path, datasets=[named])) == EXPECTED[:1]
    sliced = DatasetConfig(path=jsonl(tmp_path), split="train[:2]")
    assert texts(run(tmp_path, datasets=[sliced])) == EXPECTED[:2]


def test_sources_are_joined_in_order_each_in_its_own_folder(tmp_path: Path) -> None:
    pair = {"instruction": "i", "output": "o"}
    one, two = write(tmp_path / "a.jsonl", [pair]), write(tmp_path / "b.jsonl", ROWS[:2])
    joined = run(
        tmp_path,
        datasets=[DatasetConfig(path=str(one), type="alpaca"), DatasetConfig(path=str(two), type="text")],
    )
    assert [text[-10:] for text in texts(joined)] == [
        ":\no<|end|>"[-10:],
        *(text[-10:] for text in EXPECTED[:2]),
    ]
    folders = prepare_data(joined).folders
    assert prepare_data(run(tmp_path, data=str(two))).folders != folders  # another type, another folder
    assert prepare_data(run(tmp_path, datasets=[joined.datasets[1]])).folders == folders[1:]


def test_the_second_run_reads_the_cache(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_data(config)
    monkeypatch.setattr(prepare, "RowEncoder", None)  # a call would fail
    assert prepare_data(config).folders == first.folders


@pytest.mark.parametrize("change", ["train_on_inputs", "special_tokens", "type"])
def test_what_changes_the_tokens_changes_the_folder(change: str, config: TrainConfig, tmp_path: Path) -> None:
    changed = {
        "train_on_inputs": run(tmp_path, data=config.data, train_on_inputs=True),
        "special_tokens": run(tmp_path, data=config.data, special_tokens={"eos_token": "<|pad|>"}),
        "type": run(tmp_path, datasets=[DatasetConfig(path=str(config.data), type="text")]),
    }
    assert prepare_data(changed[change]).folders != prepare_data(config).folders


def test_changed_bytes_are_tokenised_again(config: TrainConfig) -> None:
    before = prepare_data(config).folders
    write(Path(str(config.data)), ROWS[:2])
    assert texts(config) == EXPECTED[:2]
    write(Path(str(config.data)), ROWS)
    assert prepare_data(config).folders == before


def test_what_does_not_change_the_tokens_keeps_the_folder(config: TrainConfig, tmp_path: Path) -> None:
    other = run(tmp_path, data=config.data, sequence_len=100, seed=1, val_set_size=2, micro_batch_size=3)
    assert prepare_data(other).folders == prepare_data(config).folders


def test_validation_rows_are_held_out(config: TrainConfig, tmp_path: Path) -> None:
    held = prepare_data(run(tmp_path, data=config.data, val_set_size=2))
    assert held.validation is not None
    assert (len(held.train), len(held.validation)) == (4, 2)
    both = [
        tokens[row]["input_ids"].tolist()
        for tokens in (held.train, held.validation)
        for row in range(len(tokens))
    ]
    whole = prepare_data(config).train
    assert sorted(both) == sorted(whole[row]["input_ids"].tolist() for row in range(6))


@given(num_rows=st.integers(2, 300), share=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_a_split_holds_every_row_once(num_rows: int, share: float, seed: int) -> None:
    count = round(share * num_rows)
    if not 0 < count < num_rows:
        with pytest.raises(ValueError, match="leaves none"):
            split_rows(num_rows, share, seed)
        return
    train, validation = split_rows(num_rows, share, seed)
    assert len(validation) == count
    assert sorted([*train, *validation]) == list(range(num_rows))
    assert all(np.all(np.diff(part) > 0) for part in (train, validation))
    again = split_rows(num_rows, count, seed)
    assert all(np.array_equal(a, b) for a, b in zip(again, (train, validation), strict=True))


def test_a_split_is_the_same_on_every_machine_and_differs_by_seed() -> None:
    # The first three of numpy.random.RandomState(42).permutation(10), a stream that numpy promises to keep.
    assert split_rows(10, 3, 42)[1].tolist() == [1, 5, 8]
    assert split_rows(10, 3, 43)[1].tolist() != [1, 5, 8]


@pytest.mark.parametrize("size", [6, 7, 0.05, 0.95])
def test_a_split_that_leaves_one_side_empty_is_refused(size: float) -> None:
    with pytest.raises(
        ValueError, match=f"val_set_size {size} takes .* of 6 rows, which leaves none .* between 1 and 5"
    ):
        split_rows(6, size, 0)


@pytest.mark.parametrize(
    ("overlong", "lengths"),
    [
        ("truncate", [5, 4, 5, 5, 5]),
        ("drop", [5, 4, 5]),
        ("split", [5, 4, 5, 5, 5, 5, 5, 5]),  # the 16th token of a row predicts nothing alone
    ],
)
def test_rows_above_sequence_len_follow_the_policy(overlong: Any, lengths: list[int], tmp_path: Path) -> None:
    rows = [
        {"text": "a" * (length - 1)} for length in (5, 4, 16, 5, 10)
    ]  # the end of the text is a token too
    config = run(tmp_path, data=str(write(tmp_path / "rows.jsonl", rows)), sequence_len=5, overlong=overlong)
    assert prepare_data(config).train.lengths.tolist() == lengths


def test_rows_above_sequence_len_are_an_error_by_default(tmp_path: Path) -> None:
    config = run(tmp_path, data=jsonl(tmp_path), sequence_len=5)
    with pytest.raises(
        ValueError, match=r"training: .* above max_length=5[\s\S]*key sequence_len, and overlong is a key"
    ):
        prepare_data(config)


def test_builtin_data_is_there_without_any_path(tmp_path: Path) -> None:
    prepared = prepare_data(run(tmp_path, sequence_len=512, val_set_size=0.01))
    assert len(prepared.train) > 1000
    assert int(prepared.train.lengths.max()) <= 512
    row = prepared.train[0]
    assert byte_tokenizer().decode(row["input_ids"]).startswith("<|bos|><|user|>Write the docstring of ")
    assert 0 < int((row["labels"] != -100).sum()) < len(row["labels"])


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([{"a": "x", "b": 1}], {}, r"rows.jsonl: The columns \(a, b\) fit no format"),
        ([{"text": "x"}, {"text": None}], {}, "rows.jsonl: row 1: text is None"),
        (
            [{"messages": [{"role": "user", "content": "q"}]}],
            {},
            "rows.jsonl: none of its 1 rows has a token to learn",
        ),
        (
            [{"text": "x"}],
            {"tokenizer": "x", "tokenizer_type": "NoTokenizer"},
            "tokenizer_type is NoTokenizer",
        ),
    ],
)
def test_impossible_data_names_its_file_and_leaves_nothing(
    rows: list[dict[str, Any]], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = run(tmp_path, data=str(write(tmp_path / "rows.jsonl", rows)), **values)
    with pytest.raises(ValueError, match=message):
        prepare_data(config)
    assert [path.suffix for path in (tmp_path / "prepared").glob("*")] in ([], [".lock"])


@pytest.mark.parametrize("path", ["absent.jsonl", "/absent/folder", "a/b/c"])
def test_an_absent_file_is_not_taken_for_a_name_on_the_hub(path: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"{path} does not exist. Give a file \(.*\), a folder, or a name on the hub"
    ):
        prepare_data(run(tmp_path, data=path))


def test_a_name_on_the_hub_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_file(arrow(tmp_path))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = DatasetConfig(path="owner/name", name="main", split="train")
    assert texts(run(tmp_path, datasets=[source])) == EXPECTED
    assert set(asked) == {("owner/name", "main", "train")}


def test_an_unknown_suffix_or_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.xml").write_text("<a/>", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"suffix '.xml'.* Use .jsonl, .*\.csv, .*\.parquet, .*\.gz or \.zst"
    ):
        prepare_data(run(tmp_path, data=str(tmp_path / "rows.xml")))
    for path, message in (
        (saved_splits(tmp_path), "has the splits train, test, and no 'dev'"),
        (saved(tmp_path), "saved without splits"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_data(run(tmp_path, datasets=[DatasetConfig(path=path, split="dev")]))


def test_rows_without_a_token_to_learn_are_counted_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    path = write(tmp_path / "rows.jsonl", [{"messages": [asked]}, {"messages": [asked, answered]}])
    with caplog.at_level(logging.WARNING):
        assert len(prepare_data(run(tmp_path, data=str(path))).train) == 1
    assert "1 of 2 sequences have no token to learn" in caplog.text
    assert "1 sequences (4 tokens) have no token to learn and are left out" in caplog.text


def answers(folder: Path, prompts: list[int]) -> str:
    """Rows of a prompt of so many bytes and the answer "ab", which is three tokens with its end."""
    rows = [{"prompt": "x" * length, "completion": "ab"} for length in prompts]
    return str(write(folder / "rows.jsonl", rows))


def test_targets_that_the_length_cuts_off_are_counted_and_their_rows_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Of 8 tokens: 3 + 3 whole; 6 + 2 of 3; 8 + 0; 20 + 0.
    data = answers(tmp_path, [3, 6, 8, 20])
    tokens = prepare_data(run(tmp_path, data=data, sequence_len=8, overlong="truncate")).train
    assert tokens.lengths.tolist() == [6, 8]
    report = tokens.report
    assert (report.num_target_tokens, report.sequences_without_targets) == (5, 2)
    assert (report.tokens_without_targets, report.lost_tokens) == (16, 1 + 3 + 15)
    assert "2 sequences (16 tokens) have no token to learn within max_length" in caplog.text


def test_data_whose_targets_are_all_cut_off_are_an_error(tmp_path: Path) -> None:
    config = run(tmp_path, data=answers(tmp_path, [8, 9]), sequence_len=8, overlong="truncate")
    with pytest.raises(ValueError, match=r"none of 2 rows is left with a token to learn.*Raise sequence_len"):
        prepare_data(config)


def test_fragments_without_a_target_are_left_out(tmp_path: Path) -> None:
    # 10 + 3 tokens in fragments of 8 and 5: the first holds no target, the second 3.
    config = run(tmp_path, data=answers(tmp_path, [10]), sequence_len=8, overlong="split")
    tokens = prepare_data(config).train
    assert (tokens.lengths.tolist(), tokens.starts.tolist()) == ([5], [8])
    assert tokens[0]["labels"].tolist()[:2] == [-100, -100]


def test_ids_above_the_embedding_are_named_before_the_first_step(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [3, 5000]}])
    prepared = prepare_data(run(tmp_path, data=str(data)))
    prepared.check_ids(5001)
    with pytest.raises(ValueError, match=r"the token 5000 and the model has embeddings for 0\.\.4999"):
        prepared.check_ids(5000)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_is_a_file_or_a_text(as_file: bool, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    data = write(tmp_path / "rows.jsonl", [{"messages": talk}])
    (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
    chosen = str(tmp_path / "own.jinja") if as_file else template
    config = run(tmp_path, data=str(data), chat_template=chosen)
    assert texts(config) == ["[user]q<|end|>[assistant]a<|end|>"]
    assert prepare_data(config).folders != prepare_data(run(tmp_path, data=str(data))).folders


@pytest.mark.parametrize(
    ("template", "message"),
    [("no-such-file", "neither a template .* nor a file"), ("{% if %}", "the chat template is not Jinja")],
)
def test_a_chat_template_that_is_none_is_refused(template: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_data(run(tmp_path, data=jsonl(tmp_path), chat_template=template))


def test_last_answers_and_own_field_names_are_keys(tmp_path: Path) -> None:
    said = [("u", "q1"), ("a", "a1"), ("u", "q2"), ("a", "a2")]
    roles = {"u": "user", "a": "assistant"}
    dialog = [{"speaker": roles[who], "words": text} for who, text in said]
    data = write(tmp_path / "rows.jsonl", [{"dialog": dialog, "images": ["x.png"]}])
    source = DatasetConfig(
        path=str(data),
        type="messages",
        fields={"messages": "dialog", "role": "speaker", "content": "words"},
        ignore_fields=["images"],
    )
    tokens = prepare_data(run(tmp_path, datasets=[source], train_on="last")).train
    learnt = [label for label in tokens[0]["labels"].tolist() if label != -100]
    assert byte_tokenizer().decode(learnt) == "a2<|end|>"


def test_last_answers_and_whole_inputs_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_on is last and train_on_inputs is true"):
        run(tmp_path, train_on="last", train_on_inputs=True)


def test_a_damaged_cache_is_an_error(config: TrainConfig) -> None:
    (folder,) = prepare_data(config).folders
    rows = folder / "rows.arrow"
    rows.write_bytes(rows.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"damaged\. Delete the folder"):
        prepare_data(config)
    (folder / "meta.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is damaged"):
        prepare_data(config)


def test_a_killed_writer_leaves_nothing_that_counts(config: TrainConfig) -> None:
    code = (
        "import sys, time; from multipack.train.data import prepare; from multipack.train.config import "
        "TrainConfig\nprepare.os.rename = lambda *paths: (print('written', flush=True), "
        "time.sleep(60))\nprepare.prepare_data(TrainConfig(data=sys.argv[1], "
        "dataset_prepared_path=sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(config.data), config.dataset_prepared_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"  # everything but the rename
        writer.kill()
    (unfinished,) = Path(config.dataset_prepared_path).glob("*.unfinished")
    (unfinished / "rows.arrow").write_bytes(b"half")
    assert texts(config) == EXPECTED
    assert not unfinished.exists()


def test_whoever_comes_second_waits_and_reads(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    write_folder = prepare._write_folder

    def slow(*arguments: Any) -> None:
        writes.append(threading.get_ident())
        time.sleep(0.3)
        write_folder(*arguments)

    monkeypatch.setattr(prepare, "_write_folder", slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(prepare_data(config).folders)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 1
    assert len(found) == 3
    assert len(set(found)) == 1


def test_waiting_has_an_end(config: TrainConfig, tmp_path: Path) -> None:
    (folder,) = prepare_data(config).folders
    folder.rename(tmp_path / "aside")
    impatient = run(tmp_path, data=config.data, prepare_timeout_s=0.2)
    with FileLock(folder.with_name(folder.name + ".lock")):
        start = time.monotonic()
        with pytest.raises(
            TimeoutError, match=r"held by another process for .* s. .* raise prepare_timeout_s"
        ):
            prepare_data(impatient)
    assert time.monotonic() - start < 5


def test_processes_share_one_cache(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    code = (
        "import sys; from multipack.train.config import TrainConfig; from multipack.train.data.prepare "
        "import prepare_data\nprint(prepare_data(TrainConfig(data=sys.argv[1], "
        "dataset_prepared_path=sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, path, str(tmp_path / "prepared")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(lines) == 1
    assert "6 rows" in lines.pop()


@pytest.mark.parametrize("batch_rows", [1, 4, 1000])
def test_the_batch_size_does_not_matter(
    batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_ROWS", batch_rows)
    assert texts(run(tmp_path, data=jsonl(tmp_path))) == EXPECTED
