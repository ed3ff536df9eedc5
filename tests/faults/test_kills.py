"""kill -9 at any moment of training and saving: the run goes on from its last checkpoint, and each row is
trained on exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from faults.attempts import checkpoints, ended, keys, killed_at_the_end, rows_seen, start_ranks, write_texts

from multipack.train.checkpoint import newest_checkpoint

NUM_ROWS = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts.jsonl", NUM_ROWS)
    return tmp_path


def attempt_arguments(folder: Path, **more: object) -> list[str]:
    """Go on from the last checkpoint, or begin where there is none."""
    last = {"resume_from_checkpoint": "last"} if checkpoints(folder) else {}
    return keys(folder, **last, **more)


def finish(folder: Path, ranks: int, **more: object) -> None:
    said = folder / "said"
    with killed_at_the_end(start_ranks(ranks, attempt_arguments(folder, **more), said)) as processes:
        assert ended(processes, limit_s=60) == [0] * ranks, said.read_text()[-3000:]


def steps_logged(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


@pytest.mark.distributed
@pytest.mark.slow
def test_each_row_once_whatever_is_killed_and_when(folder: Path, long_form: bool) -> None:
    rng = random.Random(0)
    kills, num_epochs = (20, 30) if long_form else (3, 6)
    how_far: list[int] = []
    attempts = 0
    while len(how_far) < kills:
        ranks = rng.choice([1, 2, 3]) if long_form else [2, 1, 2][len(how_far)]
        more = {
            "num_epochs": num_epochs,
            "save_steps": rng.choice([1, 2, 5]),
            "gradient_accumulation_steps": rng.choice([1, 2, 3]),
            "zero_stage": rng.choice([0, 1, 2, 3]),
            "ddp_timeout": 15,  # also for a rank that dies before the ranks have met
        }
        said = folder / f"said-{attempts}"
        attempts += 1
        assert attempts < 3 * kills, "the run ends before it can be killed"
        with killed_at_the_end(start_ranks(ranks, attempt_arguments(folder, **more), said)) as processes:
            if ended(processes, limit_s=rng.uniform(0.7, 2.5)) == [0] * ranks:
                break
            victims = processes if ranks == 1 or rng.random() < 0.5 else [rng.choice(processes)]
            for process in victims:
                process.kill()
            # Whoever is left notices, by itself and with an error.
            codes = ended(processes, limit_s=60)
        assert None not in codes
        assert 0 not in codes, said.read_text()[-3000:]
        how_far.append(max(checkpoints(folder), default=0))
    assert how_far == sorted(how_far)
    assert how_far[-1] > 0
    finish(folder, 2, num_epochs=num_epochs)
    assert rows_seen(folder) == sorted(list(range(NUM_ROWS)) * num_epochs)
    steps = steps_logged(folder)
    assert steps == list(range(1, steps[-1] + 1))


# Every point of a save where something is on the disk that was not there before.
PLACES = [
    "_start_afresh",
    "_start_afresh:after",
    "save",
    "save:after",
    "_checksum:after",
    "_sync_folder",
    "_delete_old",
    "_delete_old:after",
]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_death_inside_a_save_leaves_a_whole_checkpoint(folder: Path, place: str) -> None:
    short = {"max_steps": 6, "save_steps": 2, "gradient_accumulation_steps": 2, "save_total_limit": 1}
    said = folder / "said"
    die_at = "multipack.train.checkpoint:" + place
    with killed_at_the_end(start_ranks(1, keys(folder, **short), said, die_at=die_at)) as processes:
        assert ended(processes, limit_s=60) == [-9], said.read_text()[-3000:]
    # _checksum and _sync_folder are called twice in the first save.
    early = place.startswith(("_checksum", "_sync_folder"))
    assert checkpoints(folder) in ([[], [2]] if early else [[2], [2, 4], [4]])
    finish(folder, 1, **short)
    assert newest_checkpoint(folder / "out") == folder / "out" / "checkpoint-6"
    assert checkpoints(folder) == [6]
    assert not list((folder / "out").glob("*.partial"))
    rows = rows_seen(folder)
    assert len(rows) == len(set(rows))
    assert steps_logged(folder) == [1, 2, 3, 4, 5, 6]


def wait_for_first_step(folder: Path, processes: list[ForkServerProcess], said: Path) -> None:
    metrics = folder / "out" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert ended(processes, limit_s=0) == [None] * len(processes), said.read_text()[-3000:]
        time.sleep(0.02)


@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_others_soon(folder: Path) -> None:
    said = folder / "said"
    with killed_at_the_end(start_ranks(2, keys(folder, num_epochs=50), said)) as processes:
        wait_for_first_step(folder, processes, said)
        processes[1].kill()
        started = time.monotonic()
        codes = ended(processes, limit_s=30)
        assert time.monotonic() - started < 15
    assert codes[0] not in (0, None)
    assert codes[1] == -9
    assert "Error" in said.read_text()


@pytest.mark.distributed
def test_a_rank_that_falls_silent_ends_the_others_within_their_timeout(folder: Path) -> None:
    said = folder / "said"
    arguments = keys(folder, num_epochs=50, ddp_timeout=3)
    with killed_at_the_end(start_ranks(2, arguments, said)) as processes:
        wait_for_first_step(folder, processes, said)
        assert processes[1].pid is not None
        os.kill(
            processes[1].pid, signal.SIGSTOP
        )  # its connections stay open, as those of a host that was cut off
        started = time.monotonic()
        processes[0].join(timeout=30)
        assert 1.5 < time.monotonic() - started < 10
        assert processes[0].exitcode not in (0, None)
    assert "Timed out waiting 3000ms" in said.read_text()
