"""Where a loader stands: resuming equals never stopping, or is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_cases import WAYS, Rows, keys, numbers, packed, take, token_rows
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.stream import StreamPacker


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("taken", [0, 1, 5, 19])
@pytest.mark.report("Red-Hat-AI-Innovation-Team/mini_trainer#79")
@pytest.mark.report("Lightning-AI/litData#316")
@pytest.mark.report("Lightning-AI/litData#24")
def test_resuming_equals_never_stopping_for_any_workers(saved: dict[str, Any], taken: int) -> None:
    whole = packed(num_workers=0)
    expected = [keys(whole) for _ in range(3)]
    loader = packed(**saved)
    list(loader)  # one epoch, then part of the next
    iterator = iter(loader)
    assert keys(next(iterator) for _ in range(taken)) == expected[1][:taken]
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    for way in WAYS:
        resumed = packed(**way)
        resumed.load_state_dict(state)
        assert keys(resumed) == expected[1][taken:]
        assert keys(resumed) == expected[2]  # later epochs are whole


@pytest.mark.report("meta-pytorch/data#1520")
def test_state_counts_what_was_yielded_not_what_was_prefetched() -> None:
    loader = packed(prefetch_batches=10)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    deadline = time.monotonic() + 1
    while iterator._source.ready < 10 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loader.state_dict()["sampler"]["batches"] == 3


@pytest.mark.parametrize("dealt", [False, True])
def test_a_pass_is_of_the_epoch_it_began_in_and_counts_for_no_other(dealt: bool) -> None:
    rows = TokenDataset(token_rows())
    sampler: Any = MultipackBatchSampler(rows.lengths, 64)
    sampler = DistributedBatchSampler(sampler, num_replicas=1, rank=0) if dealt else sampler
    loader: Any = DataLoader(rows, batch_sampler=sampler, collate_fn=PackedCollator())
    expected = keys(loader)
    sampler.set_epoch(0)
    iterator = iter(loader)
    sampler.set_epoch(5)
    assert keys(iterator) == expected
    assert (sampler.epoch, loader.state_dict()["sampler"]["batches"]) == (5, 0)


@pytest.mark.report("meta-pytorch/data#1437")
def test_a_state_saved_after_a_whole_epoch_yields_a_whole_next_one() -> None:
    # Also inside the loop, at the last batch.
    loader = packed()
    first = list(loader)
    state = loader.state_dict()
    second = keys(loader)
    resumed = packed()
    resumed.load_state_dict(state)
    assert keys(resumed) == second
    loader = packed()
    for number, _ in enumerate(loader):
        if number + 1 == len(first):
            state = loader.state_dict()
    resumed = packed()
    resumed.load_state_dict(state)
    assert keys(resumed) == second


def test_resuming_again_and_again_loses_nothing() -> None:
    expected = keys(packed(num_workers=0))
    got: list[tuple[int, ...]] = []
    state = packed().state_dict()
    while len(got) < len(expected):
        loader = packed()
        loader.load_state_dict(state)
        got += keys(take(loader, min(3, len(expected) - len(got))))
        state = loader.state_dict()
    assert got == expected


def test_resuming_on_another_number_of_ranks_loses_and_repeats_nothing() -> None:
    def rank(number: int, of: int) -> DataLoader[dict[str, Any]]:
        return packed_dataloader(token_rows(), 256, rank=number, num_replicas=of)

    seen: list[int] = []
    loaders = [rank(r, 4) for r in range(4)]
    for loader in loaders:
        seen += [token for batch in take(loader, 3) for token in batch["input_ids"].unique().tolist()]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)  # any rank's state is everybody's
    for number in range(3):
        loader = rank(number, 3)
        loader.load_state_dict(states[0])
        seen += [token for batch in loader for token in batch["input_ids"].unique().tolist()]
    assert sorted(seen) == list(range(300))


def test_two_ranks_agree_on_the_epoch_however_far_their_queues_ran_ahead() -> None:
    first, second = packed(prefetch_batches=1), packed(prefetch_batches=1000, num_workers=3)
    for loader in (first, second):
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
    assert first.state_dict() == second.state_dict()


def test_state_of_other_data_is_refused() -> None:
    state = packed(seed=1).state_dict()
    with pytest.raises(ValueError, match="seed"):
        packed(seed=2).load_state_dict(state)
    for other in ({}, {"version": 1}, {"epoch": 3}, DataLoader(range(5)).state_dict()):
        with pytest.raises(ValueError, match="not the state"):
            packed().load_state_dict(other)


@pytest.mark.report("huggingface/datasets#5454")
def test_skipping_a_million_batches_reads_no_row() -> None:
    rows = Rows(1_000_010)
    for sampler in (None, MultipackBatchSampler(np.ones(1_000_010, np.uint16), 1, shuffle=False)):
        batches: dict[str, Any] = {"batch_sampler": sampler} if sampler is not None else {"batch_size": 1}
        loader = DataLoader(rows, num_workers=0, **batches)
        state = loader.state_dict()
        if sampler is not None:
            state["sampler"]["batches"] = 1_000_000
        else:
            state = {**state, "batches": 1_000_000, "checksum": _checksum_of_rows(1_000_000)}
        loader.load_state_dict(state)
        rows.reads = 0
        started = time.monotonic()
        iterator = iter(loader)
        assert next(iterator).tolist() == [1_000_000]
        assert rows.reads == 1
        assert time.monotonic() - started < 4.0
        assert len(list(iterator)) == 9


def _checksum_of_rows(count: int) -> int:
    import zlib

    checksum = 0
    for number in range(count):
        checksum = zlib.crc32(repr([number]).encode(), checksum)
    return checksum


def shuffled(kind: str, way: dict[str, Any]) -> DataLoader[Any]:
    rows = Rows(23)
    if kind == "generator of the loader":
        return DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(3), **way)
    if kind == "generator of the sampler":
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(3), replacement=True)
        return DataLoader(rows, 4, sampler=sampler, **way)
    if kind == "subset":
        return DataLoader(
            rows, 4, sampler=SubsetRandomSampler(range(20), generator=torch.Generator().manual_seed(3)), **way
        )
    if kind == "global seed":
        return DataLoader(rows, 4, shuffle=True, **way)
    if kind == "global seed, batch_size=None":
        return DataLoader(rows, None, shuffle=True, collate_fn=torch.tensor, **way)
    if kind == "a list":
        return DataLoader(rows, batch_sampler=[[k, k + 1] for k in range(9)], **way)
    return DataLoader(rows, 4, **way)


@pytest.mark.parametrize(
    "kind",
    [
        "in order",
        "a list",
        "generator of the loader",
        "generator of the sampler",
        "subset",
        "global seed",
        "global seed, batch_size=None",
    ],
)
@pytest.mark.parametrize("taken", [0, 2, 5, 6])
def test_torchs_samplers_resume_exactly(kind: str, taken: int) -> None:
    for way in WAYS[:3]:
        torch.manual_seed(1)
        loader = shuffled(kind, way)
        taken = min(taken, len(loader))
        whole = [numbers(loader) for _ in range(3)]

        torch.manual_seed(1)
        loader = shuffled(kind, way)
        list(loader)
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        random_state = torch.get_rng_state()  # as a checkpoint of the whole run holds it
        iterator.close()

        torch.manual_seed(99)
        resumed = shuffled(kind, way)
        resumed.load_state_dict(state)
        torch.set_rng_state(random_state)
        rest = whole[1][taken:] or whole[2]
        if not (taken == 0 and kind.startswith("global")):  # its seed may not be drawn yet
            assert numbers(resumed) == rest


def test_a_state_is_the_same_before_and_after_loading() -> None:
    for kind in ("generator of the loader", "a list"):
        loader = shuffled(kind, {})
        take(loader, 3)
        state = loader.state_dict()
        other = shuffled(kind, {})
        other.load_state_dict(state)
        assert other.state_dict() == state
        take(other, 1)
        assert other.state_dict()["batches"] == 4


def test_a_sampler_that_does_not_repeat_its_order_is_refused_on_resuming() -> None:
    torch.manual_seed(0)
    loader = DataLoader(Rows(23), 4, sampler=SubsetRandomSampler(range(23)))
    take(loader, 2)
    other = DataLoader(Rows(23), 4, sampler=SubsetRandomSampler(range(23)))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="BatchSampler gives other batches"):
        next(iter(other))


def test_a_sampler_that_has_become_shorter_is_refused_on_resuming() -> None:
    loader = DataLoader(Rows(23), 4)
    take(loader, 5)
    other = DataLoader(Rows(8), 4)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="other batches"):
        next(iter(other))


def test_state_with_other_generators_is_refused() -> None:
    state = shuffled("generator of the loader", {}).state_dict()
    with pytest.raises(ValueError, match="1 random generators"):
        shuffled("in order", {}).load_state_dict(state)


@pytest.mark.report("huggingface/accelerate#2016")
def test_an_epoch_set_by_hand_is_part_of_the_state() -> None:
    # A stop in epoch 1 resumed with the order of epoch 0
    def build() -> DataLoader[Any]:
        rows = Rows(10)
        return DataLoader(rows, 2, sampler=DistributedSampler(rows, num_replicas=1, rank=0, seed=1))

    loader = build()
    loader.set_epoch(1)
    whole = numbers(loader)
    take(loader, 2)
    state = loader.state_dict()
    resumed = build()
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert numbers(resumed) == whole[2:]
    resumed.load_state_dict(state)
    resumed.set_epoch(2)  # to another epoch: from its start
    assert len(numbers(resumed)) == 5


def test_the_epoch_in_a_state_reaches_torchs_sampler() -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Rows(20), batch_size=3, sampler=DistributedSampler(range(20), 2, 0, seed=1))

    first = loader()
    first.set_epoch(3)
    iterator = iter(first)
    next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)  # and no set_epoch
    assert numbers(second) == numbers(iterator)
    next(iter(first))
    first.set_epoch(4)
    assert (first.state_dict()["epoch"], first.state_dict()["batches"]) == (4, 0)


def test_batches_dealt_from_torchs_sampler_resume_by_epoch() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            Rows(23),
            batch_sampler=DistributedBatchSampler(BatchSampler(range(23), 4, False), num_replicas=2, rank=0),
        )

    loader = build()
    first = numbers(take(loader, 1))
    resumed = build()
    resumed.load_state_dict(loader.state_dict())
    assert first + numbers(resumed) == numbers(build())


class CountingStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.next_row, self.read = 0, 0

    def __iter__(self) -> Iterator[int]:
        start, self.next_row = self.next_row, 0
        for row in range(start, 23):
            self.next_row = row + 1
            self.read += 1
            yield row
        self.next_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_row = state["next_row"]


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stateful_iterable_data_set_resumes_behind_the_yielded_batches(
    workers: int, batch_size: int | None
) -> None:
    def build() -> DataLoader[Any]:
        threads: dict[str, Any] = {"prefetch_batches": 3, "worker_type": "thread"} if workers else {}
        return DataLoader(CountingStream(), batch_size, num_workers=workers, **threads)

    def plain(batches: Any) -> list[Any]:
        return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]

    whole = plain(build())
    loader = build()
    iterator = iter(loader)
    head = plain(next(iterator) for _ in range(2))
    state = loader.state_dict()
    assert state["batches"] == 2
    iterator.close()
    resumed = build()
    resumed.load_state_dict(state)
    assert head + plain(resumed) == whole
    assert resumed.dataset.read == 23 - 2 * (batch_size or 1)  # nothing was read again to get there
    assert plain(resumed) == whole  # the next epoch is whole


def test_an_iterable_data_set_without_a_state_is_read_again_up_to_its_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(23))

    loader = DataLoader(Plain(), 4)
    take(loader, 2)
    resumed = DataLoader(Plain(), 4)
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]
    assert "2 batches are read again" in caplog.text
    fresh = DataLoader(Plain(), 4).state_dict()
    loader.load_state_dict(fresh)
    assert len(list(loader)) == 6


def test_a_stream_read_by_other_worker_processes_is_refused_with_both_numbers() -> None:
    processes = DataLoader(CountingStream(), 4, num_workers=1, worker_type="process")
    assert len(list(processes)) == 6
    take(processes, 2)
    here = DataLoader(CountingStream(), 4)
    here.load_state_dict(processes.state_dict())
    with pytest.raises(ValueError, match=r"1 worker processes .* and now 0 do"):
        next(iter(here))
    same = DataLoader(CountingStream(), 4, num_workers=1, worker_type="process")
    same.load_state_dict(processes.state_dict())
    assert len(list(same)) == 4


def test_a_packed_stream_resumes_with_its_pool() -> None:
    rows = [{"input_ids": [k] * (1 + k % 7)} for k in range(400)]

    def build(workers: int) -> DataLoader[Any]:
        stream = StreamPacker(rows, 64, pool_size=32, rank=0, num_replicas=1)
        return DataLoader(stream, batch_size=None, collate_fn=PackedCollator(), num_workers=workers)

    whole = build(0)
    expected = keys(whole)
    assert sorted(token for batch in expected for token in set(batch)) == list(range(400))
    assert whole.stats.efficiency == pytest.approx(sum(map(len, expected)) / (64 * len(expected)))
    loader = build(2)
    head = keys(take(loader, 5))
    resumed = build(1)
    resumed.load_state_dict(loader.state_dict())
    assert head + keys(resumed) == expected


def test_batches_in_any_order_cannot_be_saved() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1, in_order=False)
    assert sorted(numbers(loader)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="in_order=True"):
        loader.state_dict()
    threads = DataLoader(Rows(8), 2, num_workers=1, in_order=False, worker_type="thread")
    assert threads.state_dict()["batches"] == 0
