"""Every argument of every part is reachable from packed_dataloader, and an unknown one names the nearest."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from loader_cases import token_rows

from multipack import (
    DataLoader,
    DistributedBatchSampler,
    MultipackBatchSampler,
    PackedCollator,
    TokenDataset,
    packed_dataloader,
)
from multipack.loading.packed import names_of

MADE_BY_IT = {
    TokenDataset: {"source"},
    MultipackBatchSampler: {"lengths", "capacity"},
    DistributedBatchSampler: {"batch_sampler"},
    PackedCollator: {"capacity"},
    # What a batch sampler excludes, and the generator of samplers that are not ours.
    DataLoader: {"dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "generator"}
    | {"shuffle", "drop_last"},
}


@pytest.mark.parametrize("part", MADE_BY_IT, ids=lambda part: part.__name__)
def test_all_arguments_of_a_part_are_options(part: Any) -> None:
    names = set(inspect.signature(part).parameters) - {"self"}
    assert names_of(part) == names - MADE_BY_IT[part]


def test_each_option_reaches_its_part() -> None:
    loader = packed_dataloader(
        token_rows(),
        256,
        window=3,
        drop_last=True,
        shuffle_block=2,
        hidden_size=99,
        balance="step",
        accumulate=2,
        return_indices=True,
        align_to=1,
        position_start=2,
        pin_memory=False,
        overlong="split",
        rank=0,
        num_replicas=1,
    )
    sampler: Any = loader.batch_sampler
    assert (sampler.dealing.hidden_size, sampler.balance, sampler.accumulate) == (99, "step", 2)
    inner = sampler.batch_sampler
    assert (inner.plan.window_bins, inner.plan.shuffle_block, inner.drop_last) == (3, 2, True)
    batch = next(iter(loader))
    assert "indices" in batch
    assert int(batch["position_ids"].min()) == 2


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'accumulte'; did you mean 'accumulate'\?"):
        packed_dataloader(token_rows(), 256, accumulte=2)
    with pytest.raises(TypeError, match="'xyzzy': it takes accumulate, "):
        packed_dataloader(token_rows(), 256, xyzzy=2)
