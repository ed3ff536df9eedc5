"""A place in an epoch counts rows of the global order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from multipack import DistributedBatchSampler, MultipackBatchSampler


def in_batches(count: int, batch_size: int, *, seed: int = 0) -> MultipackBatchSampler:
    """Shuffled rows, `batch_size` to a batch: rows of one token in bins of so many."""
    return MultipackBatchSampler([1] * count, batch_size, seed=seed, method="next_fit")


def dealt(count: int, batch_size: int, ranks: int, **more: Any) -> list[DistributedBatchSampler]:
    inner = [in_batches(count, batch_size) for _ in range(ranks)]
    return [
        DistributedBatchSampler(inner[rank], num_replicas=ranks, rank=rank, **more) for rank in range(ranks)
    ]


def take(source: Any, count: int) -> list[Any]:
    return [batch if isinstance(batch, list) else batch.tolist() for batch in itertools.islice(source, count)]


def epoch(source: Any) -> list[Any]:
    return take(source, 10**9)


@pytest.mark.report("huggingface/transformers#5605")
def test_positions_are_micro_steps() -> None:
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


@pytest.mark.report("allenai/OLMo#182")
def test_a_place_counts_samples_not_batches_of_another_size() -> None:
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
