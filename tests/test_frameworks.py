"""What accelerate and Lightning find on a loader, and what they make of it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loader_cases import WAYS, Rows, keys, packed, take, token_rows
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
)

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler


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
    monkeypatch.setattr("multipack.loading.loader.device_copier", lambda device: asked.append(device))
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
    batches = iter(loader)
    next(batches)
    rows = list(loader.sampler)
    next(batches)
    assert loader.state_dict()["sampler"]["batches"] == 4  # two of each rank, as if nobody had read the rows
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
