"""What multipack writes is data and what it reads is never run: no pickle in states and caches, no code from
data or models unless asked."""

from __future__ import annotations

import ast
import io
import json
import pickle
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from faults.attempts import ended, keys, killed_at_the_end, start_ranks, write_texts

from multipack import DistributedBatchSampler, MultipackBatchSampler, StreamPacker
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.train.checkpoint import read_state
from multipack.train.config import TrainConfig, load_config
from multipack.train.ppo.config import PPOConfig

PACKAGE = Path(__file__).parents[1] / "multipack"


def is_plain(value: Any) -> bool:
    """Whether JSON gives back the same value, so that nothing in it needs unpickling."""
    return bool(json.loads(json.dumps(value)) == value)


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return index


def states() -> dict[str, tuple[Any, Any]]:
    """Whatever can be saved, taken in the middle of a pass."""
    source = (np.zeros(90, np.int32), np.arange(0, 91, 3))
    packed = packed_dataloader(source, 6, rank=0, num_replicas=1)
    shuffled = DataLoader(Rows(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))
    stream = StreamPacker([{"input_ids": [1, 2, 3]} for _ in range(30)], 6, pool_size=4)
    streamed: Any = DataLoader(stream, batch_size=None, collate_fn=list)
    for loader in (packed, shuffled, streamed):
        next(iter(loader))
    sampler = MultipackBatchSampler([1] * 30, 3)
    dealt = DistributedBatchSampler(sampler, num_replicas=2, rank=1)
    next(iter(dealt))
    return {
        "packed loader": (packed, packed.state_dict()),
        "torch's sampler": (shuffled, shuffled.state_dict()),
        "stream": (streamed, streamed.state_dict()),
        "sampler": (sampler, sampler.state_dict()),
        "sampler of a rank": (dealt, dealt.state_dict()),
    }


@pytest.mark.parametrize(
    "name", ["packed loader", "torch's sampler", "stream", "sampler", "sampler of a rank"]
)
def test_states_are_plain_values_with_a_version_that_is_checked(name: str) -> None:
    holder, state = states()[name]
    assert is_plain(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state
    holder.load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(ValueError, match="version"):
        holder.load_state_dict(state | {"version": state["version"] + 1})
    for foreign in ({}, {"epoch": 3}, None, [1, 2], "state", pickle.dumps(state)):
        with pytest.raises(ValueError, match="not the state"):
            holder.load_state_dict(foreign)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with everything that it wrote."""
    folder: Path = tmp_path_factory.mktemp("run")
    write_texts(folder / "texts.jsonl", 60)
    said = folder / "said"
    with killed_at_the_end(start_ranks(1, keys(folder, max_steps=4, save_steps=2), said)) as processes:
        assert ended(processes, limit_s=60) == [0], said.read_text()[-3000:]
    return folder


def test_nothing_a_run_writes_is_a_pickle(trained: Path) -> None:
    kinds = {".json", ".jsonl", ".yml", ".safetensors", ".arrow", ".lock", ".png", ".jinja"}
    written = [path for part in ("out", "prepared") for path in (trained / part).rglob("*") if path.is_file()]
    assert {path.suffix for path in written} >= {".json", ".jsonl", ".safetensors", ".arrow"}
    for path in written:
        assert path.suffix in kinds or path.name.startswith("events.out.tfevents"), path
        head = path.read_bytes()[:2]
        assert not (head[:1] == b"\x80" and head[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")), path
        assert not zipfile.is_zipfile(path), path  # what torch.save writes
    for path in written:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".arrow":
            with pa.memory_map(str(path)) as file:
                assert pa.ipc.open_stream(file).read_all().num_rows == 60


def test_caches_and_checkpoints_name_their_version_and_are_checked(trained: Path) -> None:
    checkpoint = trained / "out" / "checkpoint-4"
    state = json.loads((checkpoint / "state.json").read_text())
    assert isinstance(state["version"], int)
    assert set(state["files"]) == {path.name for path in checkpoint.iterdir()} - {"state.json"}
    (meta,) = (trained / "prepared").glob("*/meta.json")
    described = json.loads(meta.read_text())
    assert isinstance(described["recipe"]["layout"], int)
    assert described["bytes"] == (meta.parent / "rows.arrow").stat().st_size


def test_a_checkpoint_folder_with_a_pickle_in_its_place_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "state.json").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with torch_group(), pytest.raises(ValueError, match="is damaged: no JSON"):
        read_state(folder)
    assert not (tmp_path / "sprung").exists()


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def torch_group() -> Any:
    from multipack.train.process import process_group

    return process_group()


def test_code_of_models_is_off_by_default() -> None:
    for config in (TrainConfig, PPOConfig):
        (default,) = [f.default for f in fields(config) if f.name == "trust_remote_code"]
        assert default is False


def calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the package."""
    return [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def imported() -> set[str]:
    """Every module that the package imports, with its parents; of `from a import b` also a.b."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            names |= {name.rsplit(".", k)[0] for name in found for k in range(name.count(".") + 1)}
    return names


def test_every_loader_of_transformers_is_told_whether_to_trust_remote_code() -> None:
    loaders = [
        (path, call)
        for path, call in calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]
    assert len(loaders) >= 3
    for path, call in loaders:
        told = {keyword.arg for keyword in call.keywords}
        assert "trust_remote_code" in told, f"{path.name}:{call.lineno}"


def test_the_package_unpickles_and_executes_nothing() -> None:
    """Modules are imported by a name from the configuration in one place: the reward, which is code by its
    nature."""
    functions = {ast.unparse(call.func) for _, call in calls()}
    assert not functions & {
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.system",
        "os.popen",
        "runpy.run_path",
    }
    assert not {name for name in functions if name.startswith(("os.exec", "os.spawn", "os.posix_spawn"))}
    assert not imported() & {
        *(
            "pickle",
            "dill",
            "cloudpickle",
            "joblib",
            "marshal",
            "shelve",
            "subprocess",
            "runpy",
            "code",
            "pty",
        ),
        *("torch.hub", "torch.jit", "torch.package"),
    }
    assert {name for name in functions if name.startswith("yaml.")} == {"yaml.safe_dump", "yaml.safe_load"}
    for path, call in calls():
        name = ast.unparse(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in ("torch.load", "np.load", "numpy.load"):
            safe = {"weights_only": "True", "allow_pickle": "False"}
            assert keywords.items() & safe.items(), f"{path.name}:{call.lineno}"
    importing = {path.name for path, call in calls() if ast.unparse(call.func) == "importlib.import_module"}
    assert importing == {"shards.py", "tasks.py"}  # libraries that are optional, by name; the reward


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch SPRUNG']",
        "!!python/name:os.system",
        "$(touch SPRUNG)",
        "`touch SPRUNG`",
        "; touch SPRUNG",
    ],
)
@pytest.mark.parametrize("key", ["data", "base_model", "output_dir", "deepspeed", "tokenizer"])
def test_values_of_a_configuration_are_never_executed(
    key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = value.replace("SPRUNG", str(tmp_path / "sprung"))
    path = tmp_path / "run.yml"
    path.write_text(f"{key}: {text}\n" if value.startswith("!!") else f"{key}: {json.dumps(text)}\n")
    if value.startswith("!!"):
        with pytest.raises(ValueError, match="YAML"):
            load_config(["--config", str(path)])
    else:
        assert getattr(load_config(["--config", str(path)]), key) == text
        assert getattr(load_config([f"--{key}={text}"]), key) == text
    assert not (tmp_path / "sprung").exists()
