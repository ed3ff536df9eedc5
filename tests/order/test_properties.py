"""What must hold in any world: random data, plans, ranks, tails and prefetching, stopped and resumed
anywhere.

`MULTIPACK_HYPOTHESIS=long` tries many more worlds. What a single module promises is tested beside that
module.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler, StreamPacker, pack
from multipack.data.collate import PackedCollator
from multipack.data.dataset import Selection, TokenDataset
from multipack.loading.loader import DataLoader
from multipack.order.batch import BatchIndices
from multipack.train.config import TrainConfig
from multipack.train.windows import epoch_steps, steps_left, windows

MANY = settings(max_examples=5 * settings().max_examples)
"""For properties of which five hundred examples take a second."""

lengths_of_rows = st.lists(st.integers(1, 30), min_size=1, max_size=80)


@dataclass(frozen=True)
class World:
    """Data and how it is cut into batches; the same on every rank and in every attempt."""

    lengths: list[int]
    packing: dict[str, Any] | None
    """Arguments of MultipackBatchSampler; None: torch's batches of `batch_size` rows in a seeded order."""
    batch_size: int
    drop_last: bool = False

    def batch_sampler(self) -> Any:
        """A new one, as in another process."""
        if self.packing is not None:
            return MultipackBatchSampler(self.lengths, drop_last=self.drop_last, **self.packing)
        rows: Any = DistributedSampler(self.lengths, num_replicas=1, rank=0, seed=5)  # type: ignore[arg-type]
        return BatchSampler(rows, self.batch_size, self.drop_last)


packings = st.fixed_dictionaries(
    {
        "capacity": st.integers(30, 70),
        "bins_per_batch": st.integers(1, 3),
        "method": st.sampled_from(["auto", "stream", "best_fit_decreasing", "next_fit"]),
        "window": st.none() | st.integers(1, 4),
        "shuffle_block": st.integers(1, 5),
        "shuffle": st.booleans(),
        "max_sequences_per_bin": st.none() | st.integers(1, 5),
        "seed": st.integers(0, 2**40),
    }
)
worlds = st.builds(World, lengths_of_rows, st.none() | packings, st.integers(1, 4))


@dataclass(frozen=True)
class Attempt:
    """Some ranks that go on from a state, for so many micro-steps each."""

    num_replicas: int
    accumulate: int
    balance: str
    balance_window: int
    micro_steps: int


attempts = st.lists(
    st.builds(
        Attempt,
        st.integers(1, 6),
        st.integers(1, 4),
        st.sampled_from(["none", "none", "micro_step", "step"]),
        st.integers(1, 3),
        st.integers(0, 12),
    ),
    max_size=6,
)
TO_THE_END = Attempt(2, 1, "none", 1, 10**9)


def ranks_of(world: World, attempt: Attempt, tail: Any) -> list[DistributedBatchSampler]:
    balance: Any = attempt.balance if world.packing is not None else "none"
    window = attempt.balance_window if balance != "none" else 1
    return [
        DistributedBatchSampler(
            world.batch_sampler(),
            num_replicas=attempt.num_replicas,
            rank=rank,
            tail=tail,
            accumulate=attempt.accumulate,
            balance=balance,
            balance_window=window,
        )
        for rank in range(attempt.num_replicas)
    ]


def stops(sampler: DistributedBatchSampler, attempt: Attempt) -> int:
    """Micro-steps to take: any number, or, where batches are dealt by cost, whole groups of them."""
    if sampler.balance == "none":
        return attempt.micro_steps
    group = attempt.accumulate * sampler.balance_window
    return -(-attempt.micro_steps // group) * group


def rows_of(batches: list[BatchIndices]) -> list[int]:
    return [row for batch in batches if not batch.repeated for row in batch]


@MANY
@given(world=worlds, chain=attempts, tail=st.sampled_from(["split", "pad"]), ask=st.booleans())
def test_each_row_once_an_epoch_over_any_chain_of_attempts(
    world: World, chain: list[Attempt], tail: Any, ask: bool
) -> None:
    state: dict[str, Any] | None = None
    seen: Counter[int] = Counter()
    for attempt in [*chain, TO_THE_END]:
        ranks = ranks_of(world, attempt, tail)
        if state is not None:
            for sampler in ranks:
                sampler.load_state_dict(state)
                if ask:  # as training loops do, before and after
                    sampler.set_epoch(state["epoch"])
        remaining = ranks[0].remaining
        taken: list[list[BatchIndices]] = []
        for sampler in ranks:
            steps = iter(sampler)
            taken.append([batch for _, batch in zip(range(stops(sampler, attempt)), steps, strict=False)])
        assert len({len(batches) for batches in taken}) == 1
        assert len(taken[0]) == min(remaining, stops(ranks[0], attempt))
        for batches in taken:
            seen.update(rows_of(batches))
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        if len(taken[0]) == remaining:
            break  # the epoch is over
    assert state is not None
    assert state["epoch"] == 1
    assert seen == dict.fromkeys(range(len(world.lengths)), 1)


@MANY
@given(
    world=worlds,
    attempt=attempts.filter(bool).map(lambda chain: chain[0]),
    tail=st.sampled_from(["split", "pad", "drop"]),
    drop_last=st.booleans(),
)
def test_two_epochs_resumed_in_the_middle_are_those_never_stopped(
    world: World, attempt: Attempt, tail: Any, drop_last: bool
) -> None:
    world = replace(world, drop_last=drop_last)
    try:
        whole = ranks_of(world, attempt, tail)
    except ValueError:  # no batch for some rank
        assert tail == "drop" or drop_last
        return
    expected = [[*sampler, *sampler] for sampler in whole]
    first, second = ranks_of(world, attempt, tail), ranks_of(world, attempt, tail)
    for before, after, batches in zip(first, second, expected, strict=True):
        started = [batch for _, batch in zip(range(stops(before, attempt)), before, strict=False)]
        after.load_state_dict(before.state_dict())
        resumed = [batch for _ in range(2 - after.epoch) for batch in after]
        assert started + resumed == batches


def with_marks(selection: Selection) -> dict[str, Any]:
    """The batch, and whether its rows count."""
    return PackedCollator(return_indices=True)(selection) | {"counts": not selection.repeated}


@given(
    world=worlds,
    chain=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 8), st.integers(0, 7)), max_size=3
    ),
)
def test_loaders_in_flight_lose_nothing(world: World, chain: list[tuple[int, int, int, int]]) -> None:
    """Rows as they arrive in batches, with threads that had run ahead by different amounts on each rank when
    the run stopped."""
    tokens = np.arange(sum(world.lengths), dtype=np.int32)
    dataset = TokenDataset((tokens, np.concatenate(([0], np.cumsum(world.lengths)))))
    state: dict[str, Any] | None = None
    seen: Counter[int] = Counter()
    for num_replicas, workers, depth, micro_steps in [*chain, (1, 1, 2, 10**9)]:
        loaders = [
            DataLoader(
                dataset,
                batch_sampler=DistributedBatchSampler(
                    world.batch_sampler(), num_replicas=num_replicas, rank=rank
                ),
                collate_fn=with_marks,
                num_workers=workers,
                worker_type="thread",
                prefetch_batches=depth + rank if workers else None,
            )
            for rank in range(num_replicas)
        ]
        counts = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            batches = [batch for _, batch in zip(range(micro_steps), iterator, strict=False)]
            iterator.close()
            counts.append(len(batches))
            for batch in batches:
                first = batch["indices"].tolist()
                starts = batch["cu_seq_lens_q"][:-1]
                own = [int(token) for token in batch["input_ids"][0, starts]]
                assert own == [sum(world.lengths[:row]) for row in first]
                seen.update(first if batch["counts"] else [])
        assert len(set(counts)) == 1
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        if state["sampler"]["epoch"] == 1:
            break
    assert seen == dict.fromkeys(range(len(world.lengths)), 1)


@given(
    rows=lengths_of_rows,
    num_replicas=st.integers(1, 4),
    accumulate=st.integers(1, 5),
    num_epochs=st.integers(1, 3),
    stop=st.integers(0, 20),
    then=st.tuples(st.integers(1, 4), st.integers(1, 5)),
)
def test_a_schedule_has_exactly_the_steps_that_are_taken(
    rows: list[int], num_replicas: int, accumulate: int, num_epochs: int, stop: int, then: tuple[int, int]
) -> None:
    """Optimizer steps counted before the run, before and after a resume on other ranks, against those that
    come."""
    dataset = TokenDataset((np.zeros(sum(rows), np.int32), np.concatenate(([0], np.cumsum(rows)))))

    def run(ranks: int, steps: int, state: Any) -> tuple[int, int, Any]:
        """Steps counted, steps taken, and the state then; every rank has windows of the same sizes."""
        config = TrainConfig(gradient_accumulation_steps=steps, num_epochs=num_epochs, sequence_len=40)
        counted, sizes, states = [], [], []
        for rank in range(ranks):
            sampler = DistributedBatchSampler(
                MultipackBatchSampler(dataset.lengths, 40), num_replicas=ranks, rank=rank, accumulate=steps
            )
            loader = DataLoader(
                dataset,
                batch_sampler=sampler,
                collate_fn=PackedCollator(),
                num_workers=0,
            )
            whole = epoch_steps(sampler, config)
            if state is not None:
                sampler.load_state_dict(state)
            counted.append(steps_left(sampler, whole, config))
            taken = [
                len(window.batches) for _, window in zip(range(limit), windows(loader, config), strict=False)
            ]
            sizes.append(taken)
            states.append(sampler.state_dict())
        assert all(other == sizes[0] for other in sizes)
        assert all(1 <= size <= steps for size in sizes[0])
        assert all(other == states[0] for other in states)
        return counted[0], len(sizes[0]), states[0]

    limit = stop
    counted, taken, state = run(num_replicas, accumulate, None)
    assert taken == min(counted, stop)
    limit = 10**9
    counted, taken, state = run(*then, state)
    assert taken == counted
    assert state["epoch"] == num_epochs


@MANY
@given(
    lengths=lengths_of_rows, capacity=st.integers(30, 60), limit=st.none() | st.integers(1, 5), data=st.data()
)
def test_a_packer_of_the_callers_is_believed_exactly_when_it_is_right(
    lengths: list[int], capacity: int, limit: int | None, data: st.DataObject
) -> None:
    """Random answers, right ones with random harm done to them, against a judge that counts."""
    right = pack(lengths, capacity, method="next_fit", max_sequences_per_bin=limit)
    offsets, indices = right.offsets.copy(), right.indices.copy()
    for _ in range(data.draw(st.integers(0, 2))):
        array = data.draw(st.sampled_from([offsets, indices]))
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.integers(-2, len(lengths) + 2))
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(indices)))
        indices = indices[:cut]

    def is_right() -> bool:
        if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 1).any():
            return False
        bins = [indices[a:b].tolist() for a, b in pairwise(offsets)]
        if sorted(row for content in bins for row in content) != list(range(len(lengths))):
            return False
        fits = all(sum(lengths[row] for row in content) <= capacity for content in bins)
        return fits and all(limit is None or len(content) <= limit for content in bins)

    def packer(lengths: Any, capacity: int) -> Any:
        return offsets, indices

    if is_right():
        packing = pack(lengths, capacity, method=packer, max_sequences_per_bin=limit)
        assert packing.offsets.tolist() == offsets.tolist()
        assert packing.indices.tolist() == indices.tolist()
    else:
        with pytest.raises(ValueError, match="packer"):
            pack(lengths, capacity, method=packer, max_sequences_per_bin=limit)


@given(
    lengths=lengths_of_rows, capacity=st.integers(30, 60), seed=st.integers(0, 99), window=st.integers(1, 5)
)
def test_a_callers_packer_makes_a_whole_plan(
    lengths: list[int], capacity: int, seed: int, window: int
) -> None:
    def in_pairs(lengths: Any, capacity: int) -> Any:
        offsets = [0]
        for row, length in enumerate(lengths):
            fits = row and row - offsets[-1] < 2 and length + lengths[row - 1] <= capacity
            if row and not (fits and row - offsets[-1] == 1):
                offsets.append(row)
        return [*offsets, len(lengths)], np.arange(len(lengths))

    plan = EpochPlan(lengths, capacity, seed=seed, window=window, method=in_pairs)
    bins = [rows.tolist() for rows in plan.bins(0, len(plan))]
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(len(rows) <= 2 and sum(lengths[row] for row in rows) <= capacity for rows in bins)


class Numbered:
    """Rows whose tokens say row and place: row * 1000 + place."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for row, length in enumerate(self.lengths):
            yield {"input_ids": [row * 1000 + place for place in range(length)]}


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=60).filter(any),
    capacity=st.integers(10, 40),
    pool_size=st.integers(1, 20),
    bins_per_batch=st.integers(1, 3),
    stopped=st.lists(st.integers(0, 5), max_size=4),
    depth=st.integers(0, 4),
)
def test_a_stream_stopped_anywhere_gives_every_token_once(
    lengths: list[int], capacity: int, pool_size: int, bins_per_batch: int, stopped: list[int], depth: int
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for count in [*stopped, 10**9]:
        stream = StreamPacker(
            Numbered(lengths), capacity, pool_size=pool_size, bins_per_batch=bins_per_batch, overlong="split"
        )
        loader = DataLoader(stream, batch_size=None, collate_fn=PackedCollator(), prefetch_batches=depth)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        batches = [batch for _, batch in zip(range(count), iterator, strict=False)]
        iterator.close()
        for batch in batches:
            assert batch["num_tokens"] <= capacity * bins_per_batch
            seen += batch["input_ids"][0].tolist()
        if len(batches) < count:
            break
        state = loader.state_dict()
    assert sorted(seen) == [
        row * 1000 + place for row, length in enumerate(lengths) for place in range(length)
    ]
