"""What a run says when it cannot go on, and what it leaves to repeat it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from multipack.train import process, sft
from multipack.train.config import load_config
from multipack.train.process import one_sentence


def test_an_error_of_the_user_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="sft: too few rows"), one_sentence("sft", ValueError):
        raise ValueError("too few rows")
    with pytest.raises(TypeError), one_sentence("sft", ValueError):
        raise TypeError("of ours, with its traceback")
    # Other ranks wait until rank 0 has said what all know, and then say what only they met.
    waited: list[float] = []
    monkeypatch.setattr(process.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit, match="sft, rank 3: no such file"), one_sentence("sft", OSError):
        raise OSError("no such file")
    assert waited == [5.0]


def losses(folder: Path, kind: str = "train") -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == kind]


def test_a_run_is_repeated_from_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"The square of {i} is {i * i}."} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "data": tmp_path / "rows.jsonl",
        "dataset_prepared_path": tmp_path / "prepared",
        "sequence_len": 128,
        "val_set_size": 8,
        "eval_on_start": "true",
        "profile_steps": 2,
        "output_dir": tmp_path / "first",
    }
    sft.main([f"--{key}={value}" for key, value in keys.items()])
    opening = capsys.readouterr().out
    assert "sft: 56 rows, " in opening
    assert "1 bins of 128 a rank and micro-step" in opening
    assert "1 ranks on cpu, zero_stage 0, float32 | " in opening
    assert losses(tmp_path / "first", "eval")[0][0] == 0

    with gzip.open(tmp_path / "first" / "trace" / "rank-0.json.gz") as file:
        assert json.load(file)["traceEvents"]

    again = str(tmp_path / "first" / "config.yml")
    assert load_config(["--config", again]) == load_config(
        [f"--{key}={value}" for key, value in keys.items()]
    )
    assert "# torch " in Path(again).read_text()
    sft.main(["--config", again, "--output_dir", str(tmp_path / "second"), "--profile_steps", "0"])
    assert losses(tmp_path / "second") == losses(tmp_path / "first")
    assert not (tmp_path / "second" / "trace").exists()
