"""The epoch and position of a batch sampler.

One rule: what the consumer took counts, never what a prefetching loader ran ahead with, so ranks cannot disagree.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from multipack.arguments import whole_number
from multipack.order.tail import BatchIndices

if TYPE_CHECKING:
    from typing_extensions import Self

STATE_VERSION = 1


class EpochForwarder:
    """What frameworks find under `batch_sampler.sampler`: it passes `set_epoch` on."""

    def __init__(self, batch_sampler: EpochSampler) -> None:
        self._batch_sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler."""
        self._batch_sampler.set_epoch(epoch)


class EpochSampler(Sampler[list[int]], ABC):
    """Epoch and position of a batch sampler; what both samplers share.

    `begin` gives the batches of the current epoch and changes nothing, so a prefetching loader may run ahead with it;
    `advance` counts one batch as handed to the consumer, and moves on to the next epoch behind the last one. Epoch and
    state therefore follow what was consumed, on every rank alike, however far prefetchers ran ahead. Plain iteration does
    both.
    """

    # Invariant: _done batches were consumed since _origin, the global position (batch, micro-step) where this pass began;
    # _resume is where the next pass begins, other than at the start only until a loaded position was made use of. Only the
    # newest pass counts: an older iterator that is read on is no longer where the sampler stands.
    batch_size = None
    drop_last: bool

    def __init__(self) -> None:
        self._epoch = 0
        self._resume = self._origin = (0, 0)
        self._done = 0
        self._newest_pass = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Lightning rebuilds the batch sampler of a plain torch loader as type(it)(a sampler of its own, batch_size=..., ...).
        if "batch_size" in kwargs:
            raise TypeError(
                f"{cls.__name__} has no batch_size: its batches are bins, not rows, and no framework can rebuild it around a sampler "
                "of its own. Under Lightning use PackedDataModule or multipack.DataLoader over DistributedBatchSampler, or deal the "
                "batches by DistributedBatchSampler and set Trainer(use_distributed_sampler=False)."
            )
        return super().__new__(cls)

    @property
    def newest_pass(self) -> int:
        """Number of the pass that `advance` counts for: `begin`, and going anywhere else, make a new one."""
        return self._newest_pass

    @property
    def epoch(self) -> int:
        """Epoch that `begin` yields: names the order of the data."""
        return self._epoch

    @property
    def sampler(self) -> EpochForwarder:
        """An object whose `set_epoch` reaches this sampler: frameworks look for it here."""
        return EpochForwarder(self)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; the epoch it already is in keeps its position, as after `load_state_dict`."""
        number = whole_number("epoch", epoch, 0)
        if number != self._epoch:
            self._epoch = number
            self._resume = self._origin = (0, 0)
            self._done = 0
            self._newest_pass += 1

    def begin(self) -> Iterator[BatchIndices]:
        """Batches of the current epoch from its start, or from a loaded position."""
        self._origin, self._done = self._resume, 0
        self._newest_pass += 1
        return self._batches_from(*self._origin)

    def advance(self) -> None:
        """Count one batch as consumed; behind the last one the next epoch begins."""
        self._resume = (0, 0)
        self._done += 1
        if not self._has_more(*self._origin, self._done):
            self.set_epoch(self._epoch + 1)

    def __iter__(self) -> Iterator[BatchIndices]:
        batches = self.begin()
        number = self._newest_pass
        for batch in batches:
            if self._newest_pass == number:
                self.advance()
            yield batch

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Batches that `begin` would yield now."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """What the order of batches depends on besides epoch and ranks, as canonical JSON."""

    @abstractmethod
    def _batches_from(self, start: int, micro_step: int) -> Iterator[BatchIndices]: ...

    @abstractmethod
    def _has_more(self, start: int, micro_step: int, done: int) -> bool: ...

    def go_to(self, epoch: int, start: int, micro_step: int) -> None:
        """Take a loaded position; one behind the last batch is the start of the next epoch."""
        self.set_epoch(epoch)
        self._resume = self._origin = (start, micro_step)
        self._done = 0
        self._newest_pass += 1
        if not self._has_more(start, micro_step, 0):
            self.set_epoch(epoch + 1)

    def check_fingerprint(self, state: dict[str, Any]) -> None:
        """Refuse the state of other data."""
        if not isinstance(state, dict) or "version" not in state or "fingerprint" not in state:
            raise ValueError(f"this is not the state of a multipack sampler: {_shorten(state)}.")
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"the state has version {state['version']}, this multipack reads version {STATE_VERSION}."
            )
        if state["fingerprint"] == self.fingerprint:
            return
        ours, theirs = json.loads(self.fingerprint), json.loads(state["fingerprint"])
        differing = [
            f"{key} ({theirs.get(key)!r} in the state, {ours.get(key)!r} here)"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        raise ValueError(
            f"the state belongs to another order of the data: {', '.join(differing)}. Going on would repeat or lose rows: "
            "build the sampler with the same inputs, or start without the state."
        )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
