"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# A shared machine may pause any test, so no example has a deadline. MULTIPACK_HYPOTHESIS=long tries far more examples.
settings.register_profile("short", deadline=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("MULTIPACK_HYPOTHESIS", "short"))
