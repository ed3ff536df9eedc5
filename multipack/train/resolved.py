"""The configuration as it was resolved, and the versions it ran with, so that a run can be repeated from its
own folder."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import yaml

from multipack.train.run_config import RunConfig

_PACKAGES = (
    "multipack",
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "numpy",
    "peft",
    "deepspeed",
    "bitsandbytes",
)


def write_resolved(config: RunConfig, folder: Path) -> Path:
    """Write `config.yml` to the run's folder: every key with its value, for `--config`, under the versions as
    comments.

    A checkpoint to resume from is left out: repeated, the run starts at its beginning.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    head = [f"python {platform.python_version()} on {device}", *filter(None, map(_installed, _PACKAGES))]
    values = asdict(config) | {"resume_from_checkpoint": None}
    path = folder / "config.yml"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(values, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


def _installed(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
