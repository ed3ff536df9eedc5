"""Checkpoints are whole or not there, fit any number of ranks and any engine, and say what is wrong with
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_llama import train_plainly
from train.engine_worker import ADAMW, LEARNING_RATE, MAX_GRAD_NORM, micro_batches
from train.ranks import run_ranks

from multipack.train import checkpoint as checkpoint_module
from multipack.train.checkpoint import (
    has_tensor,
    load_tensors,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    set_later_aside,
)
from multipack.train.process import process_group

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.mark.distributed
def test_training_goes_on_with_other_ranks_and_other_engines(tmp_path):
    steps = [[sequence for micro in step for sequence in micro] for step in micro_batches()]
    losses, _, parameters = train_plainly(steps, MAX_GRAD_NORM, lr=LEARNING_RATE, **ADAMW)
    saves = [
        "save:1:2:zero1",
        "save:2:2:zero2",
        "save:3-offload:2:zero3",
        "save:deepspeed-2:2:ds2",
        "load:deepspeed-3:3:zero1",
    ]
    eight_bit = [
        f"{verb}:{cell}:8bit:{steps}:{cell}8"
        for cell in ("1", "deepspeed-2")
        for verb, steps in (("save", 2), ("load", 3))
    ]
    run_ranks(2, WORKER, tmp_path, tmp_path / "saved.pt", *saves, *eight_bit)
    saved = torch.load(tmp_path / "saved.pt")
    assert saved[saves[-1]]["losses"] == pytest.approx(losses[2:], abs=1e-6)
    for load in eight_bit[1::2]:  # without its state the optimizer would be off by 0.01
        assert saved[load]["losses"] == pytest.approx(losses[2:], abs=5e-4)
    for ranks, loads in (
        (1, ["load:0:3:zero3", "load:3:3:zero1", "load:deepspeed-2:3:zero2"]),
        (4, ["load:1:3:zero1", "load:2:3:ds2"]),
    ):
        run_ranks(ranks, WORKER, tmp_path, tmp_path / "loaded.pt", *loads)
        for action, result in torch.load(tmp_path / "loaded.pt").items():
            assert result["losses"] == pytest.approx(losses[2:], abs=1e-6), (ranks, action)
            for name, right in parameters.items():
                torch.testing.assert_close(result["parameters"][name], right, atol=1e-6, rtol=0)


@pytest.fixture(scope="module", autouse=True)
def alone():
    with process_group():
        yield


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((3, 2), value), "optimizer.weight.step": torch.tensor(value)}


def test_what_was_saved_comes_back(tmp_path):
    path = save_checkpoint(tmp_path, 5, tensors(1.5), {"epoch": 2}, keep=1)
    found = tensors(0.0)
    load_tensors(path, found)
    assert path == tmp_path / "checkpoint-5"
    assert all(torch.equal(found[name], right) for name, right in tensors(1.5).items())
    state = read_state(path)
    assert (state["step"], state["epoch"]) == (5, 2)
    assert has_tensor(path, "model.weight")
    assert not has_tensor(path, "model.bias")


def test_the_newest_are_kept(tmp_path):
    for step in (2, 10, 9, 30):
        save_checkpoint(tmp_path, step, tensors(0.0), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-30"]
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-30"


def test_a_checkpoint_that_is_there_is_left_as_it_is(tmp_path):
    save_checkpoint(tmp_path, 5, tensors(1.5), {}, keep=1)
    path = save_checkpoint(tmp_path, 5, tensors(2.5), {}, keep=1)
    found = tensors(0.0)
    load_tensors(path, found)
    assert found["optimizer.weight.step"] == 1.5


def test_a_kill_while_an_old_one_is_deleted_leaves_no_half_of_it(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, tensors(1.0), {}, keep=1)

    def killed(folder):
        (folder / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 2, tensors(2.0), {}, keep=1)
    assert [path.name for path in tmp_path.iterdir() if "partial" not in path.name] == ["checkpoint-2"]
    save_checkpoint(tmp_path, 3, tensors(3.0), {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_checkpoints_of_an_attempt_that_is_undone_are_not_taken_for_the_runs_own(tmp_path, caplog):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, tensors(1.0), {}, keep=9)
    set_later_aside(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-10",
        "checkpoint-20",
        "checkpoint-30.undone",
    ]
    assert "checkpoint-30 is of an attempt that this run does not go on from" in caplog.text
    set_later_aside(tmp_path, 20)  # nothing is later now: what was set aside stays
    assert (tmp_path / "checkpoint-30.undone").exists()

    # The next run starts anew: all are set aside, and its own first checkpoint is the newest and is kept.
    set_later_aside(tmp_path, 0)
    path = save_checkpoint(tmp_path, 10, tensors(2.0), {}, keep=1)
    found = tensors(0.0)
    load_tensors(path, found)
    assert found["optimizer.weight.step"] == 2.0
    assert newest_checkpoint(tmp_path) == path
    assert sorted(path.name for path in tmp_path.glob("*.undone")) == [
        "checkpoint-10.undone",
        "checkpoint-20.undone",
    ]


def test_no_checkpoint_is_no_error(tmp_path):
    set_later_aside(tmp_path / "missing", 0)
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


def test_a_save_that_fails_leaves_the_last_one_and_is_cleared_away(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, tensors(1.0), {}, keep=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_finish", full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, 2, tensors(2.0), {}, keep=1)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert (tmp_path / "checkpoint-2.partial").exists()
    save_checkpoint(tmp_path, 3, tensors(3.0), {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [("truncated", "bytes instead of"), ("changed", "another checksum"), ("missing", "0 bytes instead of")],
)
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, how, message):
    save_checkpoint(tmp_path, 1, tensors(1.0), {}, keep=2)
    path = save_checkpoint(tmp_path, 2, tensors(2.0), {}, keep=2)
    (file,) = path.glob("*.safetensors")
    damage(file, how)
    with pytest.raises(ValueError, match=f"{file.name} is damaged.*{message}.*Resume from checkpoint-1"):
        read_state(path)


def test_a_change_in_any_block_of_a_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "_BLOCK_BYTES", 16)
    path = save_checkpoint(tmp_path, 1, tensors(1.0), {}, keep=1)
    read_state(path)
    (file,) = path.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    with pytest.raises(ValueError, match="another checksum"):
        read_state(path)


def test_state_that_is_no_json_is_damaged(tmp_path):
    path = save_checkpoint(tmp_path, 1, tensors(1.0), {}, keep=1)
    (path / "state.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match=r"state\.json is damaged: no JSON.*start a new run"):
        read_state(path)


def test_another_version_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, tensors(1.0), {"version": 99}, keep=1)
    with pytest.raises(ValueError, match="has version 99"):
        read_state(path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no state\.json"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.bias", (2,), "no tensor for model.bias"),
        ("model.weight", (2, 3), r"\(3, 2\) for model.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, name, shape, message):
    path = save_checkpoint(tmp_path, 1, tensors(1.0), {}, keep=1)
    with pytest.raises(ValueError, match=message):
        load_tensors(path, {name: torch.zeros(shape)})
