"""End a run in good order when the machine is taken away."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class StopOnSigterm:
    """While open, SIGTERM asks for an end instead of being one: schedulers send it some time before they
    kill."""

    requested = False
    """Whether the signal came, on this rank. The ranks agree on an end by summing this."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
