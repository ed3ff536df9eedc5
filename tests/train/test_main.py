"""The command line finds its commands and says what they are."""

from __future__ import annotations

import json

import pytest

from multipack.train.__main__ import main


def test_help_names_the_commands(capsys):
    main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("sft", "ppo", "prepare", "torchrun"))


@pytest.mark.parametrize(
    ("arguments", "problem"), [([], "a command is missing"), (["stf"], "stf is not a command")]
)
def test_an_unknown_command_is_refused_with_the_usage(arguments, problem):
    with pytest.raises(SystemExit, match=f"{problem}; choose sft, ppo or prepare"):
        main(arguments)


def test_prepare_fills_the_cache_and_trains_nothing(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    keys = {"data": "rows.jsonl", "dataset_prepared_path": "prepared", "output_dir": "out"}
    main(["prepare", *(f"--{key}={tmp_path / name}" for key, name in keys.items())])
    assert "20 rows" in capsys.readouterr().out
    assert any((tmp_path / "prepared").iterdir())
    assert not (tmp_path / "out").exists()
