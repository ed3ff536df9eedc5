"""Disks that are full and files that end early: an error that says so, nothing half written that counts, and
the run goes on."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from faults.attempts import checkpoints, ended, keys, killed_at_the_end, rows_seen, start_ranks, write_texts

from multipack.data.dataset import TokenDataset
from multipack.train.config import TrainConfig
from multipack.train.data.prepare import prepare_data

STEPS = {"gradient_accumulation_steps": 4, "save_steps": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts.jsonl", 100)
    return tmp_path


def attempt(
    folder: Path, ranks: int = 1, largest_bytes: int | None = None, **more: object
) -> tuple[list[int | None], str]:
    """Exit codes and what the ranks said."""
    said = folder / f"said-{len(list(folder.glob('said-*')))}"
    arguments = keys(folder, **STEPS, **more)
    with killed_at_the_end(start_ranks(ranks, arguments, said, largest_bytes=largest_bytes)) as processes:
        return ended(processes, limit_s=60), said.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_full_disk_ends_every_rank_and_keeps_the_last_checkpoint(folder: Path, ranks: int) -> None:
    assert attempt(folder, ranks, max_steps=2)[0] == [0] * ranks
    codes, said = attempt(folder, ranks, resume_from_checkpoint="last", largest_bytes=20_000)
    assert None not in codes
    assert 0 not in codes
    assert "File too large" in said
    assert checkpoints(folder) == [2]
    codes, said = attempt(folder, ranks, resume_from_checkpoint="last")
    assert codes == [0] * ranks, said
    assert rows_seen(folder) == list(range(100))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 kB that can be made larger; needs the right to mount."""
    disk = tmp_path / "out"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only the superuser may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_while_saving(small_disk: Path, folder: Path) -> None:
    # A checkpoint takes about 130 kB, so two fit and the third does not.
    codes, said = attempt(folder, save_total_limit=9)
    assert codes == [1]
    assert "No space left on device" in said
    steps = checkpoints(folder)
    assert len(steps) in (1, 2)
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    codes, said = attempt(folder, resume_from_checkpoint="last", save_total_limit=9)
    assert codes == [0], said
    assert rows_seen(folder) == list(range(100))


def test_a_full_disk_while_tokenising_leaves_nothing_that_counts(folder: Path) -> None:
    codes, said = attempt(folder, largest_bytes=12_000, max_steps=1)
    assert codes == [1]
    assert "File too large" in said
    assert [path for path in (folder / "prepared").iterdir() if path.suffix != ".lock"] == []
    assert attempt(folder, max_steps=1)[0] == [0]


ROWS = [{"text": "row " + "x" * (i % 50) + str(i)} for i in range(500)]


def write_file(path: Path) -> None:
    """The rows, in the format of the suffix."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".jsonl":
        path.write_bytes(lines)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".arrow"])
def test_data_that_end_early_name_their_file(suffix: str, tmp_path: Path, long_form: bool) -> None:
    path = tmp_path / ("data" + suffix)
    write_file(path)
    whole = path.read_bytes()
    config = TrainConfig(data=str(path), dataset_prepared_path=str(tmp_path / "prepared"), overlong="split")
    assert len(prepare_data(config).train) == 500
    rng = random.Random(0)
    for _ in range(40 if long_form else 3):
        cut = rng.randrange(1, len(whole) - 9)
        if suffix == ".jsonl" and whole[cut - 1 : cut] in (b"\n", b"}"):  # a whole line: just fewer rows
            continue
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=rf"{path}(, line \d+ is not JSON| cannot be read; is it whole)"):
            prepare_data(config)
        assert [entry for entry in (tmp_path / "prepared").iterdir() if entry.suffix == ".unfinished"] == []


def test_an_arrow_file_cut_anywhere_is_an_error_or_whole_batches(tmp_path: Path, long_form: bool) -> None:
    """A stream that ends between two batches has no sign of it in its bytes; everywhere else the cut is
    found."""
    lengths = np.arange(1, 101)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.arange(offsets[-1], dtype=np.int32)))
    table = pa.table({"input_ids": tokens})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    whole = sink.getvalue().to_pybytes()
    path = tmp_path / "rows.arrow"
    rng = random.Random(0)
    read_in_part = 0
    cuts = range(len(whole) + 1) if long_form else rng.sample(range(len(whole) + 1), 400)
    for cut in cuts:
        path.write_bytes(whole[:cut])
        try:
            with pa.memory_map(str(path)) as file:
                dataset = TokenDataset(pa.ipc.open_stream(file).read_all())
        except (ValueError, OSError):  # pyarrow's errors derive from these
            continue
        assert len(dataset) in (0, 20, 40, 60, 80, 100)
        read_in_part += 1
        for i in range(len(dataset)):
            assert dataset[i]["input_ids"].tolist() == list(range(offsets[i], offsets[i + 1]))
    assert read_in_part < 0.1 * len(cuts)
