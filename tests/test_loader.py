"""DataLoader over our own parts: batches, position, epochs, and what frameworks read."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader

from multipack.collate import PackedCollator
from multipack.dataset import TokenDataset
from multipack.loader import DataLoader, packed_dataloader
from multipack.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.stream import StreamPacker

WAYS = [
    {"num_workers": 0},
    {"num_workers": 1, "prefetch_batches": 7},
    {"num_workers": 3},
    {"num_workers": 2, "worker_type": "process"},
]


def token_rows(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose tokens all are the row's number, so that a batch tells which rows it holds."""
    lengths = np.random.default_rng(seed).integers(1, 60, count)
    return np.repeat(np.arange(count), lengths).astype(np.int32), np.concatenate(([0], np.cumsum(lengths)))


def packed(**arguments: Any) -> DataLoader[dict[str, Any]]:
    return packed_dataloader(token_rows(), 256, rank=0, num_replicas=1, **arguments)


def key(batch: dict[str, Any]) -> tuple[int, ...]:
    return tuple(batch["input_ids"].flatten().tolist())


def keys(batches: Any) -> list[tuple[int, ...]]:
    return [key(batch) for batch in batches]


def take(loader: Any, count: int) -> list[Any]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


class Rows(Dataset[int]):
    """Row i is i; counts its reads."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# --- batches


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_torch_loader_over_the_same_parts_gives_the_same_batches(way: dict[str, Any]) -> None:
    ours, theirs = packed(**way), packed()
    plain = TorchDataLoader(theirs.dataset, batch_sampler=theirs.batch_sampler, collate_fn=theirs.collate_fn)
    for mine, other in zip(ours, plain, strict=True):
        assert list(mine) == list(other)
        for name, value in mine.items():
            assert (
                torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            )


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_each_sequence_is_in_one_batch_of_one_rank(num_replicas: int) -> None:
    values, offsets = token_rows()
    seen: list[int] = []
    for rank in range(num_replicas):
        loader = packed_dataloader((values, offsets), 256, rank=rank, num_replicas=num_replicas)
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            bounds = batch["cu_seq_lens_q"].tolist()
            seen += [int(batch["input_ids"][0, start]) for start in bounds[:-1]]
            assert batch["num_tokens"] <= 256
    assert sorted(seen) == list(range(300))


def test_packed_dataloader_hands_every_argument_to_its_part() -> None:
    rows = [
        {"tokens": [1, 2, 3], "extra": [1, 1, 1]},
        {"tokens": [4] * 9, "extra": [1] * 9},
        {"tokens": [5], "extra": [0]},
    ]
    loader = packed_dataloader(
        rows,
        8,
        bins_per_batch=1,
        shuffle=False,
        seed=3,
        method="next_fit",
        max_sequences_per_bin=1,
        column="tokens",
        columns=["tokens"],
        max_length=5,
        overlong="split",
        layout="rows",
        pad_token_id=9,
        tail="pad",
        accumulate=2,
        rank=1,
        num_replicas=2,
        num_workers=2,
        prefetch_batches=5,
        timeout=30,
    )
    # Fragments 123, 44444, 4444, 5, a bin each: rank 1 gets the second and the fourth.
    assert [batch["input_ids"].tolist() for batch in loader] == [
        [[4, 4, 4, 4, 4, 9, 9, 9]],
        [[5, 9, 9, 9, 9, 9, 9, 9]],
    ]
    sampler = loader.batch_sampler
    assert isinstance(sampler, DistributedBatchSampler)
    assert (sampler.tail, sampler.accumulate, sampler.balance, sampler.rank) == ("pad", 2, "none", 1)
    assert isinstance(sampler.batch_sampler, MultipackBatchSampler)
    assert sampler.batch_sampler.plan.seed == 3
    assert (loader.num_workers, loader.prefetch_batches, loader.timeout) == (2, 5, 30)
    assert loader.stats.queue_depth == 5


def test_packed_dataloader_takes_a_token_dataset_as_it_is() -> None:
    dataset = TokenDataset([[1, 2], [3]])
    assert packed_dataloader(dataset, 4).dataset is dataset
    with pytest.raises(ValueError, match="already"):
        packed_dataloader(dataset, 4, overlong="drop")


def test_over_long_rows_are_an_error_by_default() -> None:
    with pytest.raises(ValueError, match="max_length=4"):
        packed_dataloader([[1] * 5, [2]], 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker_type": "fiber"},
        {"prefetch_batches": -1},
        {"num_workers": -1},
        {"timeout": 3, "num_workers": 0},
    ],
)
def test_impossible_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        packed(**wrong)


def test_the_queue_is_bounded_by_prefetch_factor_times_workers() -> None:
    assert DataLoader(range(3)).stats.queue_depth == 2
    assert DataLoader(range(3), num_workers=3, prefetch_factor=4).stats.queue_depth == 12
    assert DataLoader(range(3), num_workers=3, prefetch_batches=1000).stats.queue_depth == 1000
    assert DataLoader(range(3), num_workers=0).stats.queue_depth == 0
    rows = Rows(100)
    iterator = iter(DataLoader(rows, prefetch_batches=5))
    next(iterator)
    deadline = time.monotonic() + 1
    while rows.reads < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert rows.reads == 6
    iterator.close()


def test_processes_are_ahead_by_as_many_batches_as_asked_for() -> None:
    loader = DataLoader(range(3), num_workers=2, worker_type="process", prefetch_batches=5)
    assert loader.prefetch_factor == 3


def test_building_and_opening_touches_no_row_and_starts_no_thread() -> None:
    # VeOmni#789: a thread in the constructor moved the state before anything was consumed.
    import threading

    before = threading.active_count()
    rows = Rows(100)
    loader = DataLoader(
        rows, batch_sampler=MultipackBatchSampler([1] * 100, 4), num_workers=2, prefetch_batches=10
    )
    iterator = iter(loader)
    time.sleep(0.02)
    assert (threading.active_count(), rows.reads) == (before, 0)
    assert loader.state_dict()["sampler"]["batches"] == 0
    next(iterator)


# --- position


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("taken", [0, 1, 5, 19])
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


def test_state_counts_what_was_yielded_not_what_was_prefetched() -> None:
    # meta-pytorch/data#1518
    loader = packed(prefetch_batches=10)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    deadline = time.monotonic() + 1
    while iterator._made.ready < 10 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loader.state_dict()["sampler"]["batches"] == 3


def test_a_state_saved_after_a_whole_epoch_yields_a_whole_next_one() -> None:
    # meta-pytorch/data#1437, also inside the loop, at the last batch
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


def test_skipping_a_million_batches_reads_no_row() -> None:
    # huggingface/datasets#5454
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


# --- position with other samplers


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


def test_an_epoch_set_by_hand_is_part_of_the_state() -> None:
    # accelerate#2016: a stop in epoch 1 resumed with the order of epoch 0
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
        return DataLoader(
            CountingStream(), batch_size, num_workers=workers, prefetch_batches=3 if workers else None
        )

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


def test_an_iterable_data_set_that_cannot_say_where_it_stands_is_refused_on_resuming() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(23))

    loader = DataLoader(Plain(), 4)
    take(loader, 2)
    with pytest.raises(ValueError, match="state_dict and load_state_dict"):
        DataLoader(Plain(), 4).load_state_dict(loader.state_dict())
    fresh = DataLoader(Plain(), 4).state_dict()
    loader.load_state_dict(fresh)
    assert len(list(loader)) == 6
    processes = DataLoader(CountingStream(), 4, num_workers=1, worker_type="process")
    assert len(list(processes)) == 6
    take(processes, 2)
    with pytest.raises(ValueError, match="worker_type='thread'"):
        DataLoader(CountingStream(), 4).load_state_dict(processes.state_dict())


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


# --- epochs


@pytest.mark.parametrize("way", WAYS)
def test_epochs_go_on_by_themselves_and_set_epoch_goes_back(way: dict[str, Any]) -> None:
    loader = packed(**way)
    first, second = keys(loader), keys(loader)
    assert first != second
    loader.set_epoch(0)
    assert keys(loader) == first
    loader.set_epoch(1)
    assert keys(loader) == second


def test_a_broken_off_epoch_begins_again() -> None:
    loader = packed()
    whole = keys(packed())
    take(loader, 3)
    assert keys(loader) == whole


def test_set_epoch_reaches_batch_sampler_sampler_and_data_set() -> None:
    calls: list[tuple[str, int]] = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            calls.append((self.name, epoch))

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            return iter([[0, 1], [2, 3]])

        def __getitem__(self, index: int) -> int:
            return index

    batch_sampler = Told("batch_sampler")
    batch_sampler.sampler = Told("batch_sampler.sampler")  # type: ignore[attr-defined]
    DataLoader(Told("dataset"), batch_sampler=batch_sampler).set_epoch(7)  # type: ignore[arg-type]
    assert sorted(calls) == [("batch_sampler", 7), ("batch_sampler.sampler", 7), ("dataset", 7)]
    calls.clear()
    DataLoader(Rows(4), sampler=Told("sampler")).set_epoch(8)
    assert calls == [("sampler", 8)]


def test_the_loader_follows_its_newest_pass() -> None:
    loader = packed()
    old = iter(loader)
    next(old)
    new = iter(loader)
    for _ in range(3):
        next(new)
    next(old)  # goes on, but moves nothing
    assert loader.state_dict()["sampler"]["batches"] == 3


# --- frameworks


def test_accelerate_leaves_rank_aware_loaders_alone_and_deals_the_others() -> None:
    rows = Rows(24)
    lengths = [1] * 24

    def prepared(batch_sampler: Any = None, sampler: Any = None) -> bool:
        return DataLoader(rows, batch_sampler=batch_sampler, sampler=sampler)._is_accelerate_prepared

    packing = MultipackBatchSampler(lengths, 4)
    assert not prepared()
    assert not prepared(batch_sampler=packing)
    assert prepared(batch_sampler=DistributedBatchSampler(packing, num_replicas=2, rank=0))
    assert prepared(sampler=DistributedSampler(rows, num_replicas=2, rank=0))
    assert prepared(batch_sampler=BatchSampler(DistributedSampler(rows, num_replicas=2, rank=0), 4, False))
    assert prepared(
        batch_sampler=DistributedBatchSampler(packing, num_replicas=1, rank=0)
    )  # one rank in the world


def test_one_replica_in_a_larger_world_is_left_to_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every process would read everything, as if nobody had to deal.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = packed_dataloader(token_rows(), 256, rank=0, num_replicas=1)
    assert not loader._is_accelerate_prepared


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_synchronises_gradients_at_the_last_batch(accelerator: Any) -> None:
    loader = accelerator.prepare(packed())
    assert type(loader) is DataLoader
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for _ in range(2):
        synced = []
        for _ in loader:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
        assert len(synced) % 4 != 0  # so that the last accumulation is a partial one
        assert synced == [(k + 1) % 4 == 0 or k + 1 == len(synced) for k in range(len(synced))]
        assert not accelerator.gradient_state.in_dataloader


def test_accelerate_is_told_when_a_pass_is_broken_off(accelerator: Any) -> None:
    loader = accelerator.prepare(packed())
    for _ in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        break
    assert not accelerator.gradient_state.in_dataloader


def test_accelerate_resumes_to_the_end_of_the_pass(accelerator: Any) -> None:
    loader = packed()
    take(loader, 5)
    resumed = packed()
    resumed.load_state_dict(loader.state_dict())
    assert [resumed.end_of_dataloader for _ in resumed][-2:] == [False, True]


def test_accelerate_saves_and_restores_the_position(accelerator: Any, tmp_path: Any) -> None:
    loader = accelerator.prepare(packed())
    whole = keys(packed(num_workers=0))
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    accelerator.save_state(str(tmp_path))
    for _ in range(3):
        next(iterator)
    iterator.close()
    accelerator.load_state(str(tmp_path))
    assert keys(loader) == whole[2:]


def test_a_loader_that_accelerate_rebuilds_still_gives_the_same_batches(accelerator: Any) -> None:
    dataset = TokenDataset(token_rows())

    def build() -> DataLoader[Any]:
        sampler = MultipackBatchSampler(dataset.lengths, 256, seed=5)
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator())

    rebuilt = accelerator.prepare(build())
    assert not isinstance(getattr(rebuilt, "base_dataloader", None), DataLoader)
    assert keys(rebuilt) == keys(build())


def test_nothing_of_accelerate_is_touched_without_an_accelerator() -> None:
    loader = packed()
    list(loader)
    assert loader.end_of_dataloader is False


def test_a_prepared_loader_copies_to_accelerates_device(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("multipack.loader.device_copier", lambda device: asked.append(device))
    list(accelerator.prepare(packed()))
    list(packed())  # not prepared: stays where it is
    list(packed(device="cpu"))
    assert asked == [torch.device("cpu"), None, "cpu"]


def test_lightning_sees_that_rows_are_dealt_already() -> None:
    # It replaces loader.sampler unless that is a DistributedSampler, and then calls its set_epoch.
    loader = packed_dataloader(token_rows(), 256, rank=1, num_replicas=2)
    assert isinstance(loader.sampler, DistributedSampler)
    assert (loader.sampler.num_replicas, loader.sampler.rank) == (2, 1)
    loader.sampler.set_epoch(3)
    assert loader.batch_sampler.epoch == 3
    rows = list(loader.sampler)
    assert sorted(rows) == sorted(token for batch in loader for token in batch["input_ids"].unique().tolist())


def test_lightning_can_build_it_anew_from_its_attributes() -> None:
    # Lightning passes to the class what `vars` holds under the names of constructor arguments.
    loader = DataLoader(Rows(9), 2, prefetch_batches=3, worker_type="process", device="cpu", num_workers=2)
    attributes = vars(loader) | {"multiprocessing_context": loader.multiprocessing_context}
    for name in inspect.signature(DataLoader.__init__).parameters:
        assert name in attributes or name in ("self", "shuffle")
    assert (attributes["prefetch_batches"], attributes["worker_type"], attributes["device"]) == (
        3,
        "process",
        "cpu",
    )


def test_it_copies_and_pickles_with_its_position() -> None:
    whole = keys(packed(num_workers=0))
    for way in WAYS:
        loader = packed(**way)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
            assert other.state_dict() == state
            other.load_state_dict(state)
            assert keys(other) == whole[3:]
