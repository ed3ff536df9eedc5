"""Rows are dealt to ranks once: not twice, and not never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader as TorchDataLoader

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler


def dataset() -> TokenDataset:
    return TokenDataset([list(range(n)) for n in (3, 1, 4, 1, 5, 9, 2, 6)])


def dealt(rank: int, num_replicas: int) -> DistributedBatchSampler:
    return DistributedBatchSampler(
        MultipackBatchSampler(dataset().lengths, 10), rank=rank, num_replicas=num_replicas
    )


def prepared(sampler: Any, rank: int) -> Any:
    """What accelerate makes of a plain loader on this rank of two."""
    Accelerator(cpu=True)
    loader: Any = TorchDataLoader(dataset(), batch_sampler=sampler, collate_fn=PackedCollator())
    return prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)


@pytest.mark.report("huggingface/accelerate#4199")
def test_accelerate_may_not_deal_a_plain_loaders_share_once_more() -> None:
    # It does, and half of each rank's batches are never seen.
    with pytest.raises(ValueError, match=r"share of one of 2 ranks.*1 of 2 batches would never be seen"):
        list(prepared(dealt(0, 2), rank=0))


def test_accelerate_may_not_deal_the_share_of_a_sampler_derived_from_ours() -> None:
    class Counting(DistributedBatchSampler):
        def __iter__(self) -> Any:
            return (batch for batch in super().__iter__())

    sampler = Counting(MultipackBatchSampler(dataset().lengths, 10), rank=1, num_replicas=2)
    with pytest.raises(ValueError, match=r"share of one of 2 ranks"):
        list(prepared(sampler, rank=1))
    assert len(list(sampler)) == 2  # read by nobody's loader


def test_accelerate_may_deal_what_is_not_dealt() -> None:
    tokens = 0
    for rank in range(2):
        tokens += sum(
            batch["num_tokens"]
            for batch in prepared(MultipackBatchSampler(dataset().lengths, 10, drop_last=True), rank)
        )
    assert tokens == 31  # four bins of at most ten tokens, two a rank


def test_our_loader_refuses_to_give_all_ranks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(
        dataset(),
        batch_sampler=MultipackBatchSampler(dataset().lengths, 10),
        collate_fn=PackedCollator(),
    )
    assert sum(batch["num_tokens"] for batch in loader) == 31
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="each of 3 ranks would get the same batches"):
        iter(loader)


def test_the_same_for_all_ranks_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = DataLoader(dataset(), batch_sampler=dealt(0, 1), collate_fn=PackedCollator())
    assert torch.stack([batch["input_ids"].new_tensor(batch["num_tokens"]) for batch in loader]).sum() == 31
