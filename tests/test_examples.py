"""Every example runs, and says what it is about."""

from __future__ import annotations

import gc
import importlib
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "plain_loop.py": "epoch 1:",
    "drop_in_swap.py": "32 equal batches",
    "accelerate_loop.py": "for 4 were seen before the save",
    "hf_trainer.py": "steps, evaluation",
    "lightning_fit.py": "steps, validation",
    "deepspeed_loop.py": "rank 0, resumed:",
    "streaming.py": "resumed with the batch that would have come next",
    "numba_packer.py": "500 rows came through the loader",
    "dpo_packed.py": "64 pairs: loss",
    "elastic_resume.py": "3 ranks saw the others, each row once",
}


def test_each_example_is_run_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SAYS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}]({name})" in listed for name in scripts)


@pytest.fixture
def as_one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun sets for a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def clean_accelerate() -> Iterator[None]:
    """accelerate keeps its state in the class: give it back as it was."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# Lightning asks for a class that torch is about to take away.
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", sorted(set(SAYS) - {"deepspeed_loop.py"}))
@pytest.mark.usefixtures("clean_accelerate")
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name)
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("as_one_rank")
def test_deepspeed_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # It would compile an all-reduce through shared memory first, for a minute.
    monkeypatch.setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
    run("deepspeed_loop.py")
    assert SAYS["deepspeed_loop.py"] in capsys.readouterr().out


def run(name: str) -> None:
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    gc.collect()  # a script's names are a cycle, and may hold a loader's open iterator with its thread
