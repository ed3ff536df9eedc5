"""Plugin of pytest: the tests use the build of the compiled module that SANITIZED_CORE names, in the place of
the installed one."""

from __future__ import annotations

import os
import sys

from fuzz_core import load

sys.modules["multipack._core"] = load(os.environ["SANITIZED_CORE"])
