"""DataLoader over our own parts: batches, queue and epochs."""

from __future__ import annotations

import gc
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_cases import WAYS, Rows, keys, packed, take, token_rows
from torch.utils.data import DataLoader as TorchDataLoader

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler


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


def test_numbers_of_numpy_are_those_of_python() -> None:
    rows = [[1, 2], [2, 3], [4]]
    options: dict[str, Any] = {
        "pad_to": "capacity",
        "rank": np.int64(0),
        "num_replicas": np.int64(1),
        "seed": np.int64(3),
    }
    loader = packed_dataloader(rows, np.int64(4), **options)
    assert keys(loader) == keys(packed_dataloader(rows, 4, pad_to="capacity", seed=3))
    json.dumps(loader.state_dict())


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
@pytest.mark.report("pytorch/pytorch#11599")
def test_impossible_arguments_are_refused(wrong: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        packed(**wrong)
    gc.collect()
    assert capfd.readouterr() == ("", "")  # nothing half built was cleaned up


def test_the_queue_is_bounded_by_prefetch_factor_times_workers() -> None:
    threads: Any = {"num_workers": 3, "worker_type": "thread"}
    assert packed(num_workers=None).stats.queue_depth == 2
    assert DataLoader(range(3), prefetch_factor=4, **threads).stats.queue_depth == 12
    assert DataLoader(range(3), prefetch_batches=1000, **threads).stats.queue_depth == 1000
    assert DataLoader(range(3), num_workers=0).stats.queue_depth == 0
    rows = Rows(100)
    iterator = iter(DataLoader(rows, prefetch_batches=5, num_workers=1, worker_type="thread"))
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


@pytest.mark.report("ByteDance-Seed/VeOmni#789")
def test_building_and_opening_touches_no_row_and_starts_no_thread() -> None:
    # A thread in the constructor moved the state before anything was consumed.
    import threading

    before = threading.active_count()
    loader = packed(num_workers=2, prefetch_batches=10)
    iterator = iter(loader)
    time.sleep(0.02)
    assert threading.active_count() == before
    assert loader.state_dict()["sampler"]["batches"] == 0
    next(iterator)


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


def test_lengths_of_other_data_are_refused_with_both_sizes() -> None:
    rows = TokenDataset([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"the data set has 2 rows, but .* from the lengths of 3"):
        DataLoader(rows, batch_sampler=MultipackBatchSampler([2, 1, 1], 4), collate_fn=PackedCollator())


def test_what_an_epoch_leaves_out_is_in_the_stats() -> None:
    loader = packed_dataloader([[1] * 3] * 5, 3, tail="drop", rank=0, num_replicas=2)
    list(loader)
    assert (loader.stats.left_out_sequences, loader.stats.left_out_tokens) == (1, 3)
    assert "left out 1 sequences, 3 tokens" in str(loader.stats)


def test_no_global_generator_is_touched_by_packed_loaders() -> None:
    before = torch.get_rng_state()
    for way in WAYS:
        list(packed(**way))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copied_iterator_resumes_where_the_loader_stands() -> None:
    whole = keys(packed())
    for way in WAYS:
        iterator = iter(packed(**way))
        head = keys([next(iterator), next(iterator)])
        copied = pickle.loads(pickle.dumps(iterator))
        assert head + keys(copied) == whole == head + keys(iterator)
