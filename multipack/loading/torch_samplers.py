"""Positions in samplers that are not ours: batches are counted, and what they draw from random generators is
kept."""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from multipack.closing import Closable
from multipack.loading.feeds import STATE_VERSION, Pass, State, check_state
from multipack.order.cursor import Cursor


@dataclass(frozen=True, slots=True)
class TorchMark:
    """Where a foreign sampler stands."""

    epoch: int | None = None
    """As set by `set_epoch`; None if it never was."""
    batches: int = 0
    checksum: int = 0
    """CRC-32 over the ids so far."""
    seed: int | None = None
    """What torch's RandomSampler without a generator drew from the global state."""
    generators: tuple[str, ...] | None = None
    """States of the generators as the pass began, base64; None: as they are when it begins."""


class TorchSamplerFeed:
    """Ids of any other sampler, counted, with the states of its random generators as the pass began.

    A checksum over the ids proves on resuming that the sampler repeats its order; where it does not, resuming
    is a ValueError and never a guess. Draws from generators come in the order of torch's loader, so that a
    script that changes its import line keeps its batches.
    """

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        self.source = sampler
        self.cursor: Cursor[TorchMark] = Cursor(TorchMark(), _start_of_pass)
        self._generator = generator
        self._generators = _generators(sampler, generator)

    @property
    def resumes(self) -> bool:
        """Whether a pass that opens now continues one, whose worker seed was drawn then."""
        start = self.cursor.start
        return start.batches > 0 or start.seed is not None

    def open(self) -> Pass:
        number, start = self.cursor.begin()
        if start.generators is None:
            start = replace(start, generators=self._generator_states())
            if self.cursor.mark.batches == 0:  # prefetching may draw before the first batch is consumed
                self.cursor.mark = start
        return Pass(number, self._read(start))

    def _read(self, start: TorchMark) -> Iterator[tuple[Any, TorchMark]]:
        # A sampler may draw as its iterator is made, which torch's loader does as a pass begins.
        random_sampler = _unseeded(self.source)
        ids = iter(self.source) if random_sampler is None else None
        below = None if ids is self.source else ids
        return Closable(self._marked(ids, random_sampler, start), lambda: below)

    def _marked(
        self, ids: Iterator[Any] | None, random_sampler: RandomSampler | None, start: TorchMark
    ) -> Iterator[tuple[Any, TorchMark]]:
        seed = start.seed
        if ids is None:
            assert random_sampler is not None
            if seed is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
            ids = self._ids_by_seed(random_sampler, seed)
        count = checksum = 0
        for item in ids:
            count += 1
            checksum = zlib.crc32(repr(item).encode(), checksum)
            if count > start.batches:
                yield item, TorchMark(start.epoch, count, checksum, seed, start.generators)
            elif count == start.batches and checksum != start.checksum:
                raise ValueError(self._other_order(start.batches))
        if count < start.batches:
            raise ValueError(self._other_order(start.batches))
        if count == start.batches > 0:  # the saved pass was at its end: resume with the next one
            following = replace(_start_of_pass(start), generators=self._generator_states())
            draw_worker_seed(self._generator)
            yield from self._read(following)

    def _ids_by_seed(self, random_sampler: RandomSampler, seed: int) -> Iterator[Any]:
        """What torch's sampler does when it has no generator, with the seed kept."""
        seeded = copy.copy(random_sampler)
        seeded.generator = torch.Generator().manual_seed(seed)
        if not isinstance(self.source, BatchSampler):
            return iter(seeded)
        batches = copy.copy(self.source)
        batches.sampler = seeded
        return iter(batches)

    def is_last(self, mark: TorchMark) -> bool | None:
        try:
            return mark.batches == len(self.source)  # type: ignore[arg-type]  # any iterable; some have a length
        except TypeError:
            return None

    def ended(self, number: int) -> None:
        self.cursor.took(number, _start_of_pass(self.cursor.mark))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.cursor.mark.epoch:
            self.cursor.restart_at(TorchMark(epoch))
        tell_epoch(epoch, self.source, getattr(self.source, "sampler", None))

    def state_dict(self) -> State:
        mark = self.cursor.mark
        return {
            "version": STATE_VERSION,
            "epoch": mark.epoch,
            "batches": mark.batches,
            "checksum": mark.checksum,
            "seed": mark.seed,
            "generators": list(self._generator_states() if mark.generators is None else mark.generators),
        }

    def load_state_dict(self, state: State) -> None:
        check_state(state, "checksum")
        if len(state["generators"]) != len(self._generators):
            raise ValueError(
                f"the state holds {len(state['generators'])} random generators and "
                f"{type(self.source).__qualname__} has {len(self._generators)}: its order would be another "
                "one. Build the loader as it was built then."
            )
        for generator, text in zip(self._generators, state["generators"], strict=True):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self.cursor.go_to(
            TorchMark(
                state["epoch"], state["batches"], state["checksum"], state["seed"], tuple(state["generators"])
            )
        )

    def _generator_states(self) -> tuple[str, ...]:
        return tuple(base64.b64encode(g.get_state().numpy().tobytes()).decode() for g in self._generators)

    def _other_order(self, skip: int) -> str:
        return (
            f"{type(self.source).__qualname__} gives other batches than when the state was saved: after "
            f"skipping {skip} of them rows would be repeated or lost. Give it a generator with the seed it "
            "had, or use MultipackBatchSampler."
        )


def tell_epoch(epoch: int, *targets: Any) -> None:
    """Set the epoch of each of `targets` that wants to know, once."""
    for target in {id(t): t for t in targets}.values():
        set_epoch = getattr(target, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def draw_worker_seed(generator: torch.Generator | None) -> None:
    """Draw what torch's loader draws for its workers as a pass begins, for the sake of all later draws."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _start_of_pass(mark: TorchMark) -> TorchMark:
    return TorchMark(mark.epoch)


def _generators(sampler: Any, generator: torch.Generator | None) -> list[torch.Generator]:
    """Every generator that the order depends on, each once."""
    found = {} if generator is None else {id(generator): generator}
    seen: set[int] = set()  # a sampler may be its own `.sampler`
    while sampler is not None and id(sampler) not in seen and len(seen) < _MOST_WRAPPERS:
        seen.add(id(sampler))
        own = getattr(sampler, "generator", None)
        if isinstance(own, torch.Generator):
            found[id(own)] = own
        sampler = getattr(sampler, "sampler", None)
    return list(found.values())


_MOST_WRAPPERS = 16  # a mock has another `.sampler` below each


def _unseeded(sampler: Any) -> RandomSampler | None:
    """The RandomSampler without a generator behind a sampler of torch's, which draws its seed from the global
    state."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if type(inner) is RandomSampler and inner.generator is None else None
