"""A torch trace of a few optimizer steps, to see where their time goes (chrome://tracing, Perfetto)."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.profiler import profile

if TYPE_CHECKING:
    from typing_extensions import Self

SKIPPED_STEPS = 3
"""First steps of a process, which do what later ones do not."""


class StepProfile:
    """Leaves `trace/rank-R.json.gz` with the steps after the first `SKIPPED_STEPS`; of fewer, where the run
    ends before.

    Args:
        folder: of the run.
        num_steps: steps to trace. 0: nothing is traced and nothing is slower.
    """

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._path = folder / "trace" / f"rank-{dist.get_rank()}.json.gz"
        self._num_steps = num_steps
        self._done = 0
        self._running: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()

    def step(self) -> None:
        """Call after each optimizer step."""
        self._done += 1
        if self._num_steps and self._done == SKIPPED_STEPS:
            self._running = profile(record_shapes=True)
            self._running.start()
        elif self._running is not None and self._done == SKIPPED_STEPS + self._num_steps:
            self._write()

    def _write(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._path))
