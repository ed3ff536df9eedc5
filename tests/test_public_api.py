"""The public names, and the committed stub of the extension."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import torch

import multipack


def test_public_names_are_sorted_and_exist():
    assert multipack.__all__ == sorted(multipack.__all__)
    assert all(getattr(multipack, name).__doc__ for name in multipack.__all__)


def test_everything_a_user_can_call_says_what_it_does():
    silent = [
        f"{name}.{member}"
        for name in multipack.__all__
        if inspect.isclass(getattr(multipack, name))
        for member, value in inspect.getmembers(getattr(multipack, name))
        if not member.startswith("_") and (callable(value) or isinstance(value, property))
        if not hasattr(torch.utils.data.DataLoader, member) and not inspect.getdoc(value)
    ]
    assert silent == []


def test_version_is_that_of_the_package():
    assert multipack.__version__ == importlib.metadata.version("multipack")


def test_stub_of_the_extension_is_current(tmp_path):
    fresh = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "multipack._core", "-o", str(fresh)]
    subprocess.run(command, check=True, cwd=tmp_path)
    committed = Path(multipack.__file__).with_name("_core.pyi")
    assert committed.read_text() == fresh.read_text()


def test_planning_imports_neither_the_loader_nor_the_trainer():
    """Imports go one way, down the data flow."""
    downstream = {
        "loader",
        "loader_iterator",
        "prefetch",
        "device",
        "stats",
        "collate",
        "sampler",
        "train",
        "integrations",
    }
    folder = Path(multipack.__file__).parent
    for name in ("packing", "plan", "balance", "dataset", "tail"):
        imported = {
            line.split()[1].removeprefix("multipack.").split(".")[0]
            for line in (folder / f"{name}.py").read_text().splitlines()
            if line.startswith(("from multipack.", "import multipack."))
        }
        assert not imported & downstream, name
    for path in folder.glob("*.py"):
        assert "multipack.train" not in path.read_text(), path.name


def test_importing_the_package_needs_no_extra_and_warns_of_nothing():
    code = (
        "import sys, multipack\n"
        "extra = {'datasets', 'transformers', 'accelerate', 'peft', 'numba', 'rich', 'matplotlib', 'lightning'}\n"
        "assert not extra & set(sys.modules), extra & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
