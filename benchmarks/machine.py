"""What a figure was measured on: processor, memory, system, versions. No host name and no path."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = (
    "multipack",
    "torch",
    "numpy",
    "pyarrow",
    "datasets",
    "transformers",
    "trl",
    "accelerate",
    "torchdata",
    "spdl_core",
    "grain",
    "lightbinpack",
    "binpacking",
    "numba",
    "pytest-benchmark",
)


def processor() -> str:
    """The model's name, as the processor gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def name() -> str:
    """Processor (and GPU) with the number of cores, as a part of a file's name."""
    parts = [processor(), f"{num_cores()} cores", accelerator() or ""]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def last_core() -> int:
    """The core that single-core benchmarks are pinned to; the first one serves most interrupts."""
    return max(os.sched_getaffinity(0))


def description() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    gpu = accelerator()
    return (
        f"{processor()}, {num_cores()} cores, {memory_gib:.0f} GiB of memory, {system}, {platform.system()} "
        f"{platform.release().split('-')[0]}; {gpu or 'no GPU'}"
    )


def versions() -> str:
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"Python {platform.python_version()}, {packages}"


def commit() -> str:
    """The commit of this checkout, `+` where files differ from it; `unknown` outside a checkout."""
    found = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
        check=False,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"
