"""Public bug reports on resuming. The name of a test is repository and number; a batch names its rows."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler, Dataset

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.loading.loader import DataLoader


class Rows(Dataset[int]):
    """Row i is i; counts its reads."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def in_batches(count: int, batch_size: int, *, seed: int = 0) -> MultipackBatchSampler:
    """Shuffled rows, `batch_size` to a batch: rows of one token in bins of so many."""
    return MultipackBatchSampler([1] * count, batch_size, seed=seed, method="next_fit")


def loader(count: int, batch_size: int, *, seed: int = 0, **way: Any) -> DataLoader[Any]:
    return DataLoader(Rows(count), batch_sampler=in_batches(count, batch_size, seed=seed), **way)


def dealt(count: int, batch_size: int, ranks: int, **more: Any) -> list[DistributedBatchSampler]:
    inner = [in_batches(count, batch_size) for _ in range(ranks)]
    return [
        DistributedBatchSampler(inner[rank], num_replicas=ranks, rank=rank, **more) for rank in range(ranks)
    ]


def take(source: Any, count: int) -> list[Any]:
    return [batch if isinstance(batch, list) else batch.tolist() for batch in itertools.islice(source, count)]


def epoch(source: Any) -> list[Any]:
    return take(source, 10**9)


def test_transformers_5605_positions_are_micro_steps() -> None:
    # 2748 optimizer steps of 4 micro-steps are 10,992 batches.
    (sampler,) = dealt(27_484, 1, 1, accumulate=4)
    assert len(sampler) == 27_484
    for _ in itertools.islice(sampler, 2748 * 4):
        pass
    state = sampler.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 10_992)
    (resumed,) = dealt(27_484, 1, 1, accumulate=4)
    resumed.load_state_dict(state)
    assert resumed.remaining == 27_484 - 10_992


@pytest.mark.parametrize("workers", [0, 2])
def test_mini_trainer_79_no_batch_twice(workers: int) -> None:
    whole = epoch(loader(20, 1, num_workers=workers))
    first = loader(20, 1, num_workers=workers)
    before = take(first, 10)
    second = loader(20, 1, num_workers=workers)
    second.load_state_dict(first.state_dict())
    after = epoch(second)
    assert after[0] == whole[10]
    assert before + after == whole
    assert sorted(row for batch in whole for row in batch) == list(range(20))


@pytest.mark.parametrize("with_set_epoch", [False, True])
def test_open_instruct_681_only_the_epoch_under_way_is_cut(with_set_epoch: bool) -> None:
    first = loader(100, 1)
    take(first, 30)
    second = loader(100, 1)
    second.load_state_dict(first.state_dict())
    counts = []
    for number in (0, 1):
        if with_set_epoch:
            second.set_epoch(number)
        counts.append(len(epoch(second)))
    assert counts == [70, 100]


@pytest.mark.parametrize("with_set_epoch", [False, True])
def test_accelerate_2016_a_stop_in_the_second_epoch_keeps_its_order(with_set_epoch: bool) -> None:
    whole = loader(10, 2, seed=1)
    epochs = [epoch(whole), epoch(whole)]
    assert epochs[0] != epochs[1]
    stopped = loader(10, 2, seed=1)
    epoch(stopped)
    take(stopped, 2)
    state = stopped.state_dict()
    assert state["sampler"]["epoch"] == 1
    resumed = loader(10, 2, seed=1)
    resumed.load_state_dict(state)
    if with_set_epoch:
        resumed.set_epoch(1)
    assert epoch(resumed) == epochs[1][2:]


def test_data_1437_a_state_at_the_end_of_an_epoch_begins_the_next() -> None:
    whole = loader(100, 1)
    epochs = [epoch(whole) for _ in range(3)]
    first = loader(100, 1)
    for _ in range(2):
        epoch(first)
    second = loader(100, 1)
    second.load_state_dict(first.state_dict())
    assert epoch(second) == epochs[2]
    # A state taken with the last batch, before the loop has found the end, is the same place.
    third, last = loader(100, 1), loader(100, 1)
    take(third, 100)
    last.load_state_dict(third.state_dict())
    assert epoch(last) == epochs[1]


@pytest.mark.parametrize("workers", [0, 3])
def test_litdata_316_epochs_after_a_resumed_one_are_whole(workers: int) -> None:
    first = loader(100, 4, num_workers=workers)
    take(first, 21)
    second = loader(100, 4, num_workers=workers)
    second.load_state_dict(first.state_dict())
    epochs = [epoch(second) for _ in range(3)]
    assert [len(batches) for batches in epochs] == [4, 25, 25]
    assert all(
        sorted(row for batch in batches for row in batch) == list(range(100)) for batches in epochs[1:]
    )


@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize(("saved", "resumed"), [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_litdata_24_any_number_of_workers_loads_any_state(saved: int, resumed: int, worker_type: Any) -> None:
    whole = epoch(loader(24, 4))
    first = loader(24, 4, num_workers=saved, worker_type=worker_type)
    take(first, 2)
    second = loader(24, 4, num_workers=resumed, worker_type=worker_type)
    second.load_state_dict(first.state_dict())
    assert epoch(second) == whole[2:]


@pytest.mark.parametrize("taken", [0, 1, 5, 9])
def test_grain_1178_a_state_from_the_start_gives_the_same_order(taken: int) -> None:
    def make() -> MultipackBatchSampler:
        # Two windows, as in the report: 5 rows of its shuffle window each.
        return MultipackBatchSampler([1] * 10, 1, seed=42, window=5)

    whole = epoch(make())
    first, second = make(), make()
    take(first, taken)
    second.load_state_dict(first.state_dict())
    assert epoch(second) == whole[taken:]


@pytest.mark.parametrize("accumulate", [1, 2])  # with 2 the run stops in the middle of an optimizer step
def test_torchft_292_fewer_ranks_go_on_and_are_told_of_the_smaller_step(
    accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    four = dealt(64, 2, 4, accumulate=accumulate)
    seen = [row for sampler in four for batch in take(sampler, 3) for row in batch]
    states = [sampler.state_dict() for sampler in four]
    assert all(state == states[0] for state in states)
    assert states[0]["batches"] * 2 == len(seen) == 24  # one place in the global order, not a rank's count
    two = dealt(64, 2, 2, accumulate=accumulate)
    for sampler in two:
        sampler.load_state_dict(states[0])
    assert [sampler.remaining for sampler in two] == [10, 10]
    rest = [epoch(sampler) for sampler in two]
    assert [len(batches) for batches in rest] == [10, 10]
    assert sorted(seen + [row for batches in rest for batch in batches for row in batch]) == list(range(64))
    (record,) = caplog.records  # of rank 0 alone
    assert record.levelno == logging.WARNING
    assert (
        f"had {4 * accumulate} batches (4 ranks x {accumulate} micro-steps) when the state was saved and has {2 * accumulate} now"
        in record.getMessage()
    )


def test_prime_rl_1035_one_number_serves_all_ranks() -> None:
    # Lengths that pack unevenly: after some steps the ranks have taken different numbers of rows.
    lengths = np.random.default_rng(0).integers(1, 60, 400)

    def ranks() -> list[DistributedBatchSampler]:
        return [
            DistributedBatchSampler(MultipackBatchSampler(lengths, 128), num_replicas=2, rank=rank)
            for rank in range(2)
        ]

    whole = [epoch(sampler) for sampler in ranks()]
    stopped = ranks()
    taken = [take(sampler, 6) for sampler in stopped]
    assert sum(map(len, taken[0])) != sum(map(len, taken[1]))
    assert stopped[0].state_dict() == stopped[1].state_dict()
    resumed = ranks()
    for sampler in resumed:
        sampler.load_state_dict(stopped[0].state_dict())
    assert [epoch(sampler) for sampler in resumed] == [batches[6:] for batches in whole]


def test_olmo_182_a_place_counts_samples_not_batches_of_another_size() -> None:
    # 8 ranks of one row each: a global batch of 8, and 16 after the change.
    eight = dealt(1000, 1, 8)
    for sampler in eight:
        take(sampler, 10)
    state = eight[0].state_dict()
    assert state["batches"] == 80
    sixteen = dealt(1000, 1, 16)
    for sampler in sixteen:
        sampler.load_state_dict(state)
    rest = [epoch(sampler) for sampler in sixteen]
    assert [len(batches) for batches in rest] == [58] * 16  # 920 = 57 x 16 + 8
    assert [batches[57].repeated for batches in rest] == [False] * 8 + [True] * 8
    counted = [row for batches in rest for batch in batches if not batch.repeated for row in batch]
    assert len(counted) == len(set(counted)) == 920
    # Where a batch itself changes its size, batches cannot be counted on: an error.
    with pytest.raises(ValueError, match=r"capacity \(1 in the state, 2 here\)"):
        dealt(1000, 2, 8)[0].load_state_dict(state)


def test_datasets_5454_skipping_reads_nothing() -> None:
    count = 1_000_010
    rows = Rows(count)
    resumed = DataLoader(rows, batch_sampler=in_batches(count, 1), num_workers=0)
    state = resumed.state_dict()
    state["sampler"]["batches"] = 1_000_000
    started = time.process_time()
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    assert rows.reads == 0
    first = next(iterator)
    assert time.process_time() - started < 1.0
    assert first.tolist() == in_batches(count, 1).plan.bins(1_000_000, 1_000_001)[0].tolist()
    assert rows.reads == 1
    # A sampler that is not ours is asked for its ids, but no row is read either.
    sampler = BatchSampler(range(1000), 1, drop_last=False)
    stopped = DataLoader(rows, batch_sampler=sampler, num_workers=0)
    take(stopped, 900)
    other = DataLoader(rows, batch_sampler=sampler, num_workers=0)
    other.load_state_dict(stopped.state_dict())
    rows.reads = 0
    assert next(iter(other)).tolist() == [900]
    assert rows.reads == 1


def test_data_1520_prefetched_is_not_consumed() -> None:
    whole = epoch(loader(50, 1))
    first = loader(50, 1, prefetch_batches=10)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    while iterator._made.ready < 10:  # let the thread run as far ahead as it may
        time.sleep(0.001)
    assert first.state_dict()["sampler"]["batches"] == 3
    second = loader(50, 1, prefetch_batches=10)
    second.load_state_dict(first.state_dict())
    assert epoch(second) == whole[3:]
