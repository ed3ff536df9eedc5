"""Start a script on several gloo ranks, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def torchrun(ranks: int) -> list[str]:
    """The command before the script; one rank needs no torchrun."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def environment() -> dict[str, str]:
    """One thread a rank; the tests' own modules can be imported."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_ranks(ranks: int, *arguments: str | Path, timeout_s: float = 200) -> str:
    """Run a script, or `-m` and a module, to its end; its standard output. A failure shows what the ranks
    said."""
    done = subprocess.run(
        [*torchrun(ranks), *map(str, arguments)],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-20000:]
    return done.stdout
