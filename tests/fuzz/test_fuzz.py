"""Two seconds of random calls of the installed module. `tests/sanitize.sh` makes many more, on builds that
see each wrong access."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from multipack import _core


def test_random_calls_get_an_answer_or_an_exception(long_form: bool) -> None:
    script = Path(__file__).with_name("fuzz_core.py")
    command = [sys.executable, str(script), str(_core.__file__), "60" if long_form else "2", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # the module itself says at exit what it still holds
