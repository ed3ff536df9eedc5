"""Rank discovery: arguments, else the process group, else torchrun's environment, else alone."""

from __future__ import annotations

import pytest

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.distributed import check_agreement, rank_and_world_size


@pytest.fixture(autouse=True)
def _no_ranks_in_the_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_alone_without_any_hint():
    assert rank_and_world_size() == (0, 1)
    check_agreement("anything")  # nobody to disagree with


@pytest.mark.report("EleutherAI/bergson#214")
def test_torchrun_environment_counts_before_a_process_group_exists(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size() == (2, 4)
    sampler = DistributedBatchSampler(MultipackBatchSampler([1] * 100, 1))
    assert len(sampler) == 25
    assert (sampler.rank, sampler.num_replicas) == (2, 4)


def test_arguments_win(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size(1, 2) == (1, 2)
    assert rank_and_world_size(None, 8) == (2, 8)


@pytest.mark.report("ahmdtaha/simsiam#4")
def test_the_gpu_number_is_not_a_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert rank_and_world_size() == (0, 1)
    with pytest.raises(ValueError, match=r"rank 5 is outside 0\.\.3 of 4 ranks.*not of the GPU"):
        rank_and_world_size(5, 4)


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="RANK is set in the environment but not WORLD_SIZE"):
        rank_and_world_size()
