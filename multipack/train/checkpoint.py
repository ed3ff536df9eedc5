"""Checkpoints: tensors through torch.distributed.checkpoint, everything else as JSON.

A checkpoint is a folder `checkpoint-STEP`: safetensors files, which each rank wrote its part of and which any
number of ranks can read, and `state.json`, written last, with the sizes and checksums of the others. It is
written beside its place and renamed when it is whole, so whatever has the name is complete. Nothing in it is
code: it is read without unpickling.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
VERSION = 1
_NAME = re.compile(r"checkpoint-\d+")
_BLOCK_BYTES = 1 << 22


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *, keep: int
) -> Path:
    """Write `folder/checkpoint-STEP`, all ranks together, then delete all but the `keep` newest.

    Args:
        folder: of the run; on storage that all ranks see.
        tensors: by name, this rank's (DTensors where it holds shards); a name that several ranks have is the
            same tensor there.
        state: JSON values, the same on every rank.

    Returns:
        The folder of the checkpoint. One that is already there is left as it is.
    """
    final = folder / f"checkpoint-{step}"
    partial = folder / f"checkpoint-{step}.partial"
    if _on_rank_0(final.exists):
        return final
    _on_rank_0(lambda: _start_afresh(partial))
    save(
        _without_scalars(tensors),
        storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
    )
    _on_rank_0(lambda: _finish(partial, final, {"version": VERSION, "step": step, **state}))
    _on_rank_0(lambda: _delete_old(folder, keep))
    return final


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in `folder`; None if there is none."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def checkpoint_to_resume(resume_from_checkpoint: str | None, folder: Path) -> Path | None:
    """The checkpoint that the key names: none, a folder, or with "last" the newest in the run's `folder`.

    Raises:
        ValueError: it says "last" and the folder has none.
    """
    if resume_from_checkpoint != "last":
        return None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
    newest = newest_checkpoint(folder)
    if newest is None:
        raise ValueError(
            f"resume_from_checkpoint is last but {folder} has no checkpoint. Leave it out for the first "
            "attempt."
        )
    return newest


def set_later_aside(folder: Path, step: int) -> None:
    """Rename checkpoints of a later step than `step` to `checkpoint-STEP.undone`, all ranks together.

    They are of an attempt that this run does not go on from, and would be taken for its own. Those that were
    set aside before go.
    """
    for path in _on_rank_0(lambda: _set_aside(folder, step)):
        logger.warning(
            "%s is of an attempt that this run does not go on from: renamed to %s.undone", path, path.name
        )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, once the files beside it are known to be whole. All ranks together.

    Raises:
        ValueError: no checkpoint, one that is damaged (names the file), or one of another version of
            multipack.
    """
    state: dict[str, Any] = _on_rank_0(lambda: _verified_state(checkpoint))
    return state


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place from a checkpoint, each rank with its part. All ranks together.

    Raises:
        ValueError: the checkpoint lacks a tensor or has it in another shape: it is of another model or
            optimizer.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    wanted = _without_scalars(tensors)
    entries = reader.read_metadata().state_dict_metadata.items()
    stored = {name: tuple(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
    for name, tensor in wanted.items():
        if stored.get(name) != tuple(tensor.shape):
            raise ValueError(
                f"{checkpoint} has {stored.get(name, 'no tensor')} for {name}, this run needs "
                f"{tuple(tensor.shape)}: it is of another model or optimizer. Resume with the configuration "
                "that wrote it."
            )
    load(wanted, storage_reader=reader)


def has_tensor(checkpoint: Path, name: str) -> bool:
    """Whether a checkpoint holds a tensor of that name."""
    return name in HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata


def _without_scalars(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same memory under shapes the file format can cut into parts: a scalar as one element."""
    return {
        name: tensor.view(1) if tensor.ndim == 0 and not isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def _on_rank_0(act: Any) -> Any:
    """What `act()` gives on rank 0, on every rank; its error is every rank's error."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except (OSError, ValueError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _start_afresh(partial: Path) -> None:
    for old in partial.parent.glob("checkpoint-*.partial"):
        shutil.rmtree(old)
    partial.mkdir(parents=True)


def _finish(partial: Path, final: Path, state: dict[str, Any]) -> None:
    files = {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(partial.iterdir())}
    with (partial / STATE_FILE).open("w", encoding="utf-8") as stream:
        json.dump(state | {"files": files}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verified_state(checkpoint: Path) -> dict[str, Any]:
    state_file = checkpoint / STATE_FILE
    if not state_file.is_file():
        raise ValueError(
            f"{checkpoint} is no checkpoint: it has no {STATE_FILE}. Give a folder checkpoint-STEP of an "
            "earlier run."
        )
    try:
        state: dict[str, Any] = json.loads(state_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(_damaged(state_file, f"no JSON ({error})")) from error
    if state.get("version") != VERSION:
        raise ValueError(
            f"{checkpoint} has version {state.get('version')}, this multipack reads version {VERSION}."
        )
    for name, (size, checksum) in state["files"].items():
        path = checkpoint / name
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise ValueError(_damaged(path, f"{found} bytes instead of {size}"))
        if _checksum(path) != checksum:
            raise ValueError(_damaged(path, "another checksum than when it was written"))
    return state


def _damaged(path: Path, how: str) -> str:
    older = [other.name for other in _checkpoints(path.parent.parent) if other != path.parent]
    remedy = (
        f"Resume from {older[-1]}" if older else "There is no other checkpoint beside it: start a new run"
    )
    return f"{path} is damaged: {how}. {remedy}, or copy the folder again."


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _set_aside(folder: Path, step: int) -> list[Path]:
    later = [path for path in _checkpoints(folder) if _step_of(path) > step]
    if later:
        for older in folder.glob("checkpoint-*.undone"):
            shutil.rmtree(older)
    for path in later:
        path.rename(path.with_name(path.name + ".undone"))
    return later


def _delete_old(folder: Path, keep: int) -> None:
    for old in _checkpoints(folder)[:-keep]:
        # Renamed first: a kill while deleting must not leave half a checkpoint under the name of a whole one.
        doomed = old.with_name(old.name + ".partial")
        old.rename(doomed)
        shutil.rmtree(doomed)
