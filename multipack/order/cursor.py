"""Where the consumer of a source stands.

The one rule: only consuming moves it, and only the newest pass counts. Whoever consumed a batch hands over
the mark that came with it; what a prefetcher ran ahead with is unknown here, so ranks cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class Cursor(Generic[M]):
    """The mark of the batch consumed last; the only mutable state of a source.

    Args:
        mark: where a run begins.
        restart: the start of the epoch of a mark, where a pass begins that resumes nothing.
    """

    # Invariant: `mark` is where a run resumes. `_loaded`: it was loaded and no batch was consumed since, so
    # the next pass begins there. `_newest` numbers the only pass whose batches count; going anywhere takes a
    # new number, and leaves no pass that counts.
    def __init__(self, mark: M, restart: Callable[[M], M]) -> None:
        self.mark = mark
        self._restart = restart
        self._loaded = False
        self._newest = 0
        self._interrupted = -1

    @property
    def start(self) -> M:
        """Where a pass that begins now starts."""
        return self.mark if self._loaded else self._restart(self.mark)

    def begin(self) -> tuple[int, M]:
        """Number of a new pass, and where it starts. Moves nothing."""
        self._newest += 1
        return self._newest, self.start

    def took(self, number: int, mark: M) -> None:
        """The consumer took a batch of pass `number`."""
        if number == self._newest:
            self.mark = mark
            self._loaded = False

    def go_to(self, mark: M) -> None:
        """Resume at a saved mark. A pass that is open obeys with its next batch, see `was_interrupted`."""
        self._interrupted = self._newest
        self._move(mark, loaded=True)

    def restart_at(self, mark: M) -> None:
        """Go to the start of an epoch. A pass that is open goes on, and no longer counts."""
        self._move(mark, loaded=False)

    def was_interrupted(self, number: int) -> bool:
        """Whether a mark was loaded while pass `number` was the newest, and no other pass has resumed there
        since."""
        return self._loaded and number == self._interrupted

    def _move(self, mark: M, *, loaded: bool) -> None:
        self.mark = mark
        self._loaded = loaded
        self._newest += 1
