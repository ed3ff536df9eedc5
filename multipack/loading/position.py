"""Where a loader stands in its data: which batches come next, and how to go on from a saved state.

One rule: a position counts batches that were yielded, never batches that were only prefetched. What the threads ran ahead with is
made again after a resume, so nothing is lost or repeated. Skipping takes row ids only; no row is read.
"""

from __future__ import annotations

import base64
import copy
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, RandomSampler

from multipack.order.epoch import EpochSampler
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler

State = dict[str, Any]
Pairs = Iterable[tuple[Any, Any]]  # what to make a batch of, and a mark that says where it is
STATE_VERSION = 1


class Position(Protocol):
    """What a loader asks. A pass is one iteration over the loader: `start` once, or `begin` and then `pairs`."""

    def start(self, draw_first: bool) -> Pairs:
        """Begin a pass in the caller's thread; with `draw_first` the first pair is taken now, else as iteration begins."""

    def begin(self) -> None:
        """Begin a pass whose pairs torch's own loader takes."""

    def pairs(self) -> Pairs:
        """The pairs of the pass that was begun."""

    def remaining(self) -> int | None:
        """Batches that the pass just begun will yield; None where nobody knows."""

    def yielded(self, mark: Any) -> None:
        """The batch with this mark went to the consumer."""

    def ended(self) -> None:
        """The pass yielded all it had."""

    def set_epoch(self, epoch: int) -> None:
        """The caller goes to an epoch."""

    def state_dict(self) -> State:
        """Plain ints, strings and lists; what the data set adds is its own affair."""

    def load_state_dict(self, state: State) -> None:
        """The next pass begins there. ValueError when it cannot."""


class EpochPosition:
    """The position is our sampler's own, which counts what was consumed and knows its order."""

    def __init__(self, sampler: MultipackBatchSampler | DistributedBatchSampler) -> None:
        self._sampler = sampler
        self._pass = 0

    def start(self, draw_first: bool) -> Pairs:
        return self.pairs()

    def begin(self) -> None:
        pass

    def pairs(self) -> Pairs:
        batches = self._sampler.begin()
        self._pass = self._sampler.newest_pass
        return ((ids, None) for ids in batches)

    def remaining(self) -> int:
        return self._sampler.remaining

    def yielded(self, mark: Any) -> None:
        if self._sampler.newest_pass == self._pass:  # nobody went elsewhere meanwhile
            self._sampler.advance()

    def ended(self) -> None:
        pass

    def set_epoch(self, epoch: int) -> None:
        pass  # the loader tells the sampler itself

    def state_dict(self) -> State:
        return {"version": STATE_VERSION, "sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: State) -> None:
        _check_state(state, "sampler")
        self._sampler.load_state_dict(state["sampler"])


class CountedPosition:
    """Batches of any other sampler, counted, with the state of its random generators as the pass began.

    A checksum over the ids proves on resuming that the sampler repeats its order; where it does not, resuming is a ValueError and
    never a guess. torch's RandomSampler without a generator draws one seed from the global state: that one is kept.

    Draws from generators come in the order of torch's loader, so that a script that changes its import line keeps its batches.
    """

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        self._sampler = sampler
        self._generator = generator
        self._generators = _generators(sampler, generator)
        self._epoch: int | None = None
        self._loaded: State | None = None  # where the next pass begins, if not at its start
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._batches = 0
        self._checksum = 0
        self._seed: int | None = None
        self._before: list[str] | None = None  # states of the generators as the pass began

    def start(self, draw_first: bool) -> Pairs:
        resumes = self._loaded is not None
        self.begin()
        pairs = self.pairs()
        if self._generator is not None or not resumes:
            self._draw_worker_seed()
        if draw_first:
            pairs = (
                self.pairs()
            )  # torch with workers asks its sampler twice, and a sampler may draw each time
        here = FirstHere(iter(pairs))
        return iter(here) if draw_first else here

    def begin(self) -> None:
        loaded, self._loaded = self._loaded, None
        self._forget_pass()
        self._before = self._generator_states()
        if loaded is not None:
            self._batches, self._checksum, self._seed = loaded["batches"], loaded["checksum"], loaded["seed"]

    def pairs(self) -> Pairs:
        return self._marked(self._ids(), self._batches, self._checksum)

    def _ids(self) -> Iterator[Any]:
        random_sampler = _unseeded(self._sampler)
        return iter(self._sampler) if random_sampler is None else self._ids_by_seed(random_sampler)

    def _ids_by_seed(self, random_sampler: RandomSampler) -> Iterator[Any]:
        """What torch's sampler does when it has no generator, with the seed kept."""
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        seeded = copy.copy(random_sampler)
        seeded.generator = torch.Generator()
        seeded.generator.manual_seed(self._seed)
        if isinstance(self._sampler, BatchSampler):
            batches = copy.copy(self._sampler)
            batches.sampler = seeded
            yield from batches
        else:
            yield from seeded

    def _marked(self, ids: Iterator[Any], skip: int, expected: int) -> Iterator[tuple[Any, int]]:
        count = checksum = 0
        for item in ids:
            checksum = zlib.crc32(repr(item).encode(), checksum)
            count += 1
            if count > skip:
                yield item, checksum
            elif count == skip and checksum != expected:
                raise ValueError(self._other_order(skip))
        if count < skip:
            raise ValueError(self._other_order(skip))
        if count == skip > 0:  # the saved pass was at its end: go on with the next one
            self.begin()
            self._draw_worker_seed()
            yield from self._marked(self._ids(), 0, 0)

    def _other_order(self, skip: int) -> str:
        return (
            f"{_name(self._sampler)} gives other batches than when the state was saved: after skipping {skip} of them rows "
            "would be repeated or lost. Give it a generator with the seed it had, or use MultipackBatchSampler."
        )

    def _draw_worker_seed(self) -> None:
        """Draw what torch's loader draws for its workers, for the sake of all later draws."""
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)

    def remaining(self) -> int:
        total: int = len(self._sampler)  # type: ignore[arg-type]
        return total - self._batches

    def yielded(self, mark: Any) -> None:
        self._batches += 1
        self._checksum = mark

    def ended(self) -> None:
        self._forget_pass()

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._loaded = None
            self._forget_pass()

    def state_dict(self) -> State:
        if self._loaded is not None:
            return dict(self._loaded)
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "batches": self._batches,
            "checksum": self._checksum,
            "seed": self._seed,
            "generators": self._generator_states() if self._before is None else self._before,
        }

    def load_state_dict(self, state: State) -> None:
        _check_state(state, "checksum")
        if len(state["generators"]) != len(self._generators):
            raise ValueError(
                f"the state holds {len(state['generators'])} random generators and {_name(self._sampler)} has "
                f"{len(self._generators)}: its order would be another one. Build the loader as it was built then."
            )
        self._forget_pass()
        self._epoch = state["epoch"]
        self._loaded = dict(state) if state["batches"] or state["seed"] is not None else None
        for generator, text in zip(self._generators, state["generators"], strict=True):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))

    def _generator_states(self) -> list[str]:
        return [base64.b64encode(g.get_state().numpy().tobytes()).decode() for g in self._generators]


class StreamPosition:
    """Position of an iterable data set: its own state after each batch, where it has `state_dict` and `load_state_dict`."""

    def __init__(self, dataset: Any, rows: Iterable[Any] | None) -> None:
        """`rows` gives the rows of each batch; None where worker processes read, whose data sets are out of reach."""
        self._dataset = dataset
        self._rows = rows
        self._is_stateful = (
            rows is not None and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        )
        self._loaded: State | None = None
        self._batches = 0
        self._state: Any = None

    def start(self, draw_first: bool) -> Pairs:
        self.begin()
        return self.pairs()

    def begin(self) -> None:
        loaded, self._loaded = self._loaded, None
        self._batches, self._state = 0, None
        if loaded is not None:
            self._dataset.load_state_dict(loaded["dataset"])
            self._batches, self._state = loaded["batches"], loaded["dataset"]

    def pairs(self) -> Pairs:
        assert self._rows is not None
        return ((rows, self._dataset.state_dict() if self._is_stateful else None) for rows in self._rows)

    def remaining(self) -> None:
        return None

    def yielded(self, mark: Any) -> None:
        self._batches += 1
        self._state = mark

    def ended(self) -> None:
        self._batches, self._state = 0, None

    def set_epoch(self, epoch: int) -> None:
        pass  # the loader tells the data set itself

    def state_dict(self) -> State:
        if self._loaded is not None:
            return dict(self._loaded)
        return {"version": STATE_VERSION, "batches": self._batches, "dataset": self._state}

    def load_state_dict(self, state: State) -> None:
        _check_state(state, "dataset")
        if state["batches"] and (state["dataset"] is None or not self._is_stateful):
            raise ValueError(
                f"{state['batches']} batches of the iterable data set {_name(self._dataset)} were yielded, but nobody can say "
                "where it stood: it has no state_dict and load_state_dict, or was read in worker processes. Give it both "
                "and use worker_type='thread', or begin the epoch anew without this state."
            )
        self._batches, self._state = 0, None
        self._loaded = dict(state) if state["batches"] else None


class FirstHere:
    """Takes the first item in the thread that calls `iter`: a sampler may draw from the global random state for it, which must
    not happen beside the consumer's own draws."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for first in self._items:
            return chain((first,), self._items)
        return iter(())


def position_of(
    index_sampler: Iterable[Any], generator: torch.Generator | None
) -> EpochPosition | CountedPosition:
    """The position for a sampler of ids or batches of ids."""
    if isinstance(index_sampler, EpochSampler):
        assert isinstance(index_sampler, MultipackBatchSampler | DistributedBatchSampler)
        return EpochPosition(index_sampler)
    return CountedPosition(index_sampler, generator)


def _generators(sampler: Any, generator: torch.Generator | None) -> list[torch.Generator]:
    """Every generator that the order depends on, each once."""
    found = {} if generator is None else {id(generator): generator}
    while sampler is not None:
        own = getattr(sampler, "generator", None)
        if isinstance(own, torch.Generator):
            found[id(own)] = own
        sampler = getattr(sampler, "sampler", None)
    return list(found.values())


def _unseeded(sampler: Any) -> RandomSampler | None:
    """The RandomSampler without a generator behind a sampler of torch's, which draws its seed from the global state."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if type(inner) is RandomSampler and inner.generator is None else None


def _check_state(state: Any, key: str) -> None:
    if not isinstance(state, dict) or "version" not in state or key not in state:
        raise ValueError(
            f"this is not the state of a multipack loader over such data: {state!r:.200}. A state fits the kind of sampler it "
            "was saved with: one of multipack's, another one, or an iterable data set."
        )
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this multipack reads version {STATE_VERSION}."
        )


def _name(thing: object) -> str:
    return type(thing).__qualname__
