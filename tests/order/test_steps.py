"""What an optimizer step holds can be asked of the sampler, and is what the ranks then read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.batch import BatchIndices


def packed(count: int = 400, **more: Any) -> MultipackBatchSampler:
    lengths = np.random.default_rng(3).integers(1, 60, count)
    return MultipackBatchSampler(lengths, 64, seed=5, **more)


def single(count: int) -> MultipackBatchSampler:
    """Batch i holds row i."""
    return MultipackBatchSampler([1] * count, 1, shuffle=False, method="next_fit")


def dealt(inner: Any, ranks: int, **options: Any) -> list[DistributedBatchSampler]:
    return [DistributedBatchSampler(inner, num_replicas=ranks, rank=r, **options) for r in range(ranks)]


def described(batch: BatchIndices) -> tuple[Any, ...]:
    return tuple(batch), batch.bin_offsets, batch.bin_capacity, batch.repeated, batch.groups


def test_a_step_holds_batches_by_micro_step_and_rank() -> None:
    # Micro-step s gives rank r batch 2 s + r, and a step is two micro-steps.
    sampler = DistributedBatchSampler(single(10), num_replicas=2, rank=1, accumulate=2)
    assert sampler.rows_of(0) == [[[0], [1]], [[2], [3]]]
    assert sampler.rows_of(1) == [[[4], [5]], [[6], [7]]]
    assert sampler.rows_of(2) == [[[8], [9]]]
    with pytest.raises(ValueError, match="epoch 0 has no step 3: it has 3 optimizer steps"):
        sampler.rows_of(3)
    with pytest.raises(ValueError, match="step"):
        sampler.rows_of(-1)


@pytest.mark.parametrize("tail", ["split", "pad", "drop"])
@pytest.mark.parametrize(
    ("balance", "window"), [("none", 1), ("micro_step", 1), ("step", 1), ("step", 3), ("micro_step", 4)]
)
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (3, 2), (4, 3)])
def test_every_step_is_what_the_ranks_read(
    tail: Any, balance: Any, window: int, ranks: int, accumulate: int
) -> None:
    options = {"tail": tail, "balance": balance, "balance_window": window, "accumulate": accumulate}
    samplers = dealt(packed(), ranks, **options)
    read = [list(sampler.read()) for sampler in samplers]
    num_steps = -(-len(read[0]) // accumulate)
    seen: list[int] = []
    for step in range(num_steps):
        found = samplers[-1].rows_of(step)
        for m, by_rank in enumerate(found):
            for r, batch in enumerate(by_rank):
                assert described(batch) == described(read[r][step * accumulate + m])
                seen += [] if batch.repeated else batch
        assert len(found) == min(accumulate, len(read[0]) - step * accumulate)
    with pytest.raises(ValueError, match=f"no step {num_steps}"):
        samplers[0].rows_of(num_steps)
    assert len(seen) == len(set(seen))
    if tail != "drop":
        assert sorted(seen) == list(range(400))


def test_looking_moves_nothing_and_reaches_any_epoch() -> None:
    sampler = DistributedBatchSampler(packed(), num_replicas=2, rank=0)
    passing = iter(sampler)
    next(passing)
    before = sampler.state_dict()
    later = sampler.rows_of(1, epoch=7)
    assert sampler.state_dict() == before
    sampler.set_epoch(7)
    assert [described(b[0]) for b in later] == [described(b) for b in itertools.islice(sampler.read(), 1, 2)]


def test_groups_are_named_and_the_global_order_can_be_asked_too() -> None:
    inner = MultipackBatchSampler([20, 30] * 200, 128, together=np.arange(400) // 2)
    (batch,) = inner.rows_of(3)[0]
    assert batch.groups is not None
    assert list(batch.groups) == [row // 2 for row in batch]
    assert described(batch) == described(next(itertools.islice(inner.read(), 3, None)))


def test_an_order_that_is_drawn_cannot_be_asked() -> None:
    generator = torch.Generator().manual_seed(0)
    inner = BatchSampler(RandomSampler(range(10), generator=generator), 2, drop_last=False)
    sampler = DistributedBatchSampler(inner, num_replicas=1, rank=0)
    state = generator.get_state()
    with pytest.raises(ValueError, match="unknown before they are read"):
        sampler.rows_of(0)
    assert torch.equal(generator.get_state(), state)
