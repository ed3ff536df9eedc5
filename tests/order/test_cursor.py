"""Epoch and position of both samplers: what was consumed counts, and a loaded position is used once."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from torch.utils.data import BatchSampler

from multipack import DistributedBatchSampler, MultipackBatchSampler


def sampler_of(kind: str) -> Any:
    """Twenty batches in all; dealt by cost, a rank has ten in optimizer steps of four."""
    packing = MultipackBatchSampler([3, 1] * 20, 4, seed=1)
    if kind == "global":
        return packing
    balance: Any = "none" if kind == "dealt" else "micro_step"
    return DistributedBatchSampler(packing, num_replicas=2, rank=1, accumulate=4, balance=balance)


KINDS = pytest.mark.parametrize("kind", ["global", "dealt", "balanced"])


@KINDS
@pytest.mark.parametrize("taken", [1, 5])
def test_an_epoch_that_was_broken_off_starts_again(kind, taken):
    sampler = sampler_of(kind)
    everything = list(sampler.read())
    assert list(islice(sampler, taken)) == everything[:taken]
    assert list(sampler) == everything
    assert (sampler.epoch, sampler.remaining) == (1, len(everything))


@KINDS
@pytest.mark.parametrize("taken", [1, 5])
def test_a_loaded_position_is_used_once(kind, taken):
    stopped, sampler = sampler_of(kind), sampler_of(kind)
    everything = list(sampler.read())
    list(islice(stopped, taken))
    list(islice(sampler, 3))
    sampler.load_state_dict(stopped.state_dict())
    assert sampler.state_dict() == stopped.state_dict()
    assert sampler.remaining == len(everything) - taken
    assert list(islice(sampler, 2)) == everything[taken : taken + 2]
    assert list(sampler) == everything  # that pass was broken off as well


@KINDS
@pytest.mark.report("allenai/open-instruct#681")
def test_a_position_belongs_to_its_epoch(kind):
    stopped, sampler, fresh = sampler_of(kind), sampler_of(kind), sampler_of(kind)
    list(islice(stopped, 5))
    sampler.load_state_dict(stopped.state_dict())
    sampler.set_epoch(0)  # where it is already
    assert sampler.remaining == len(sampler) - 5
    for epoch in (2, 0):
        sampler.set_epoch(epoch)
        fresh.set_epoch(epoch)
        assert sampler.state_dict() == fresh.state_dict()
        assert list(sampler.read()) == list(fresh.read())


@KINDS
def test_epochs_are_counted_from_zero(kind):
    with pytest.raises(ValueError, match="epoch is -1, below 0"):
        sampler_of(kind).set_epoch(-1)


def test_a_state_of_another_kind_of_sampler_names_what_it_lacks():
    rows = DistributedBatchSampler(BatchSampler(range(20), 2, False), num_replicas=2, rank=0)
    with pytest.raises(
        ValueError, match=r"batch_size \(None in the state, 2 here\).*capacity \(4 in the state, None"
    ):
        rows.load_state_dict(sampler_of("dealt").state_dict())
