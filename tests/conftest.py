"""Settings of all tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers import SHARED
from hypothesis import settings

# For tests of the folder benchmarks; last, so that the multipack that is installed comes first.
sys.path.append(str(Path(__file__).parents[1]))

# A shell that starts the tests in the background has them ignore Ctrl-C, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine may pause any test, so no example has a deadline. MULTIPACK_HYPOTHESIS=long tries far more
# examples.
settings.register_profile("short", deadline=None)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("MULTIPACK_HYPOTHESIS", "short"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the folder `shared`, tests that read it are skipped; CI has it."""
    if SHARED.is_dir():
        return
    skip = pytest.mark.skip(reason=f"no folder {SHARED.name} beside the checkout")
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def long_form() -> bool:
    """Whether kills, interrupts and cuts come as often as a night allows, by the same switch as random
    examples."""
    return os.environ.get("MULTIPACK_HYPOTHESIS") == "long"
