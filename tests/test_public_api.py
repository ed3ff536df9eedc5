"""The public names, and the committed stub of the extension."""

from __future__ import annotations

import ast
import graphlib
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


ROOMS = ("data", "order", "loading", "integrations")
"""In the order of the way of the data: a room may import those before it."""


def test_rooms_import_one_way_and_nothing_imports_the_trainer():
    folder = Path(multipack.__file__).parent
    for place, room in enumerate(ROOMS):
        for path in (folder / room).glob("*.py"):
            imported = {name.split(".")[1] for name in _imports(path) if name.startswith("multipack.")}
            assert not imported & {*ROOMS[place + 1 :], "train", "cli"}, path.name


def test_no_files_of_the_core_import_each_other_in_a_circle():
    folder = Path(multipack.__file__).parent
    graph = {
        ".".join(("multipack", *path.relative_to(folder).with_suffix("").parts)): _imports(path)
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" and path.relative_to(folder).parts[0] not in ("train", "cli")
    }
    order = graphlib.TopologicalSorter({file: names & graph.keys() for file, names in graph.items()})
    order.prepare()  # raises CycleError, which names the circle


def _imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, also for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_importing_the_package_needs_no_extra_and_warns_of_nothing():
    code = (
        "import sys, multipack\n"
        "extra = {'datasets', 'transformers', 'accelerate', 'peft', 'numba', 'rich', 'matplotlib', 'lightning'}\n"
        "assert not extra & set(sys.modules), extra & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
