"""Optimizer steps that a run leaves out stay out, over resumes and on other ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from multipack import DataLoader, DistributedBatchSampler, MultipackBatchSampler, packed_dataloader


def single(count: int) -> MultipackBatchSampler:
    """Batch i holds row i."""
    return MultipackBatchSampler([1] * count, 1, shuffle=False, method="next_fit")


def dealt(count: int, ranks: int, **options: Any) -> list[DistributedBatchSampler]:
    return [
        DistributedBatchSampler(single(count), num_replicas=ranks, rank=r, **options) for r in range(ranks)
    ]


def take(sampler: Any, count: int) -> list[int]:
    return [row for batch in itertools.islice(sampler, count) for row in batch]


def test_metaseq_resumes_behind_the_steps_left_out() -> None:
    # https://github.com/facebookresearch/metaseq/issues/500, with steps from 0: 0 1 2 3 (4 5 6) 7 8 9.
    (sampler,) = dealt(10, 1)
    assert take(sampler, 4) == [0, 1, 2, 3]
    (resumed,) = dealt(10, 1)
    resumed.load_state_dict(sampler.state_dict())
    resumed.skip_steps(range(4, 7))
    assert resumed.remaining == 3
    assert len(resumed) == 7
    assert take(resumed, 1) == [7]
    (again,) = dealt(10, 1)
    again.load_state_dict(resumed.state_dict())
    assert again.remaining == 2
    assert take(again, 10) == [8, 9]
    assert len(again) == 10  # the next epoch is whole


def test_skipping_before_a_state_is_loaded_is_the_same() -> None:
    (sampler,) = dealt(10, 1)
    take(sampler, 4)
    (resumed,) = dealt(10, 1)
    resumed.skip_steps(range(4, 7))
    resumed.load_state_dict(sampler.state_dict())
    resumed.skip_steps([5, 6])  # said already
    assert take(resumed, 10) == [7, 8, 9]


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_rows_stay_out_on_other_ranks(ranks: int) -> None:
    # 2 ranks x 2 micro-steps: step s holds batches 4 s..4 s + 3, so steps 4 to 6 are rows 16..27.
    before = dealt(40, 2, accumulate=2)
    for sampler in before:
        sampler.skip_steps(range(4, 7))
        take(sampler, 4)
    state = before[0].state_dict()
    assert (state["batches"], state["skipped"]) == (8, [[0, 16, 28]])
    after = dealt(40, ranks, accumulate=2)
    for sampler in after:
        sampler.load_state_dict(state)
    assert {s.remaining for s in after} == {-(-20 // ranks)}
    rows = [batch for s in after for batch in s.read()]
    assert sorted(row for batch in rows if not batch.repeated for row in batch) == [
        *range(8, 16),
        *range(28, 40),
    ]


@pytest.mark.parametrize(("balance", "window"), [("none", 1), ("micro_step", 1), ("step", 1), ("step", 2)])
@pytest.mark.parametrize("consumed", [0, 3, 4, 9])
def test_the_other_steps_hold_what_they_held(balance: Any, window: int, consumed: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 500)
    options: dict[str, Any] = {"accumulate": 2, "balance": balance, "balance_window": window}

    def samplers() -> list[DistributedBatchSampler]:
        inner = MultipackBatchSampler(lengths, 64, seed=2)
        return [DistributedBatchSampler(inner, num_replicas=3, rank=r, **options) for r in range(3)]

    out = set(range(6, 10))
    for rank, sampler in enumerate(samplers()):
        whole = list(sampler.read())
        passing = iter(sampler)
        taken = [list(batch) for batch in itertools.islice(passing, consumed)]
        sampler.skip_steps(out)
        state = sampler.state_dict()
        expected = [list(b) for i, b in enumerate(whole) if i // 2 not in out]
        assert taken + [list(b) for b in passing] == expected  # the open pass follows
        resumed = samplers()[rank]
        resumed.load_state_dict(state)
        assert resumed.remaining == len(expected) - consumed
        assert [list(b) for b in resumed] == expected[consumed:]


def test_the_first_and_the_last_steps_can_be_left_out() -> None:
    samplers = dealt(10, 2, accumulate=2)  # steps 0123 4567 89
    for sampler in samplers:
        sampler.skip_steps([0, 2])
        assert sampler.remaining == 2
        assert sampler.rows_of(1) == [[[4], [5]], [[6], [7]]]
    assert samplers[0].state_dict()["batches"] == 0
    assert [take(s, 10) for s in samplers] == [[4, 6], [5, 7]]
    assert samplers[0].epoch == 1


def test_an_epoch_to_come() -> None:
    (sampler,) = dealt(6, 1)
    sampler.skip_steps([1, 2], epoch=1)
    assert [take(sampler, 10) for _ in range(3)] == [[0, 1, 2, 3, 4, 5], [0, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_what_cannot_be_left_out_is_refused() -> None:
    (sampler,) = dealt(10, 1)
    with pytest.raises(ValueError, match="no step 10: it has 10"):
        sampler.skip_steps([9, 10])
    with pytest.raises(ValueError, match="nothing of epoch 0 would be left"):
        sampler.skip_steps(range(10))
    take(sampler, 4)
    with pytest.raises(ValueError, match="begun already: its first 4 global batches"):
        sampler.skip_steps([3, 4])
    with pytest.raises(ValueError, match="nothing of epoch 0 would be left"):
        sampler.skip_steps(range(4, 10))
    assert sampler.skipped == []
    assert "skipped" not in sampler.state_dict()
    (balanced,) = dealt(16, 1, accumulate=2, balance="step", balance_window=2)
    with pytest.raises(ValueError, match="deals batches among steps 2 to 3, so step 3 cannot stay"):
        balanced.skip_steps([2])
    take(balanced, 5)  # inside the window of steps 2 and 3
    with pytest.raises(ValueError, match="begun already: its first 8"):
        balanced.skip_steps([2, 3])
    inner = single(4)
    inner.skip_steps([1])
    with pytest.raises(ValueError, match="skips steps of its own"):
        DistributedBatchSampler(inner, num_replicas=1, rank=0)
    drawn = BatchSampler(RandomSampler(range(4), generator=torch.Generator()), 1, drop_last=False)
    with pytest.raises(ValueError, match="not named by the epoch alone"):
        DistributedBatchSampler(drawn, num_replicas=1, rank=0).skip_steps([1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_ran_ahead_follows(num_workers: int) -> None:
    # Rows of one token; prefetched batches of the steps left out are thrown away.
    def loader() -> DataLoader[dict[str, Any]]:
        rows = [[i] for i in range(10)]
        return packed_dataloader(
            rows, 1, shuffle=False, method="next_fit", rank=0, num_replicas=1, num_workers=num_workers
        )

    first = loader()
    seen = []
    for batch in first:
        seen.append(int(batch["input_ids"][0, 0]))
        if seen == [0, 1, 2, 3]:
            first.skip_steps(range(4, 7))
        if seen[-1] == 7:
            break
    assert seen == [0, 1, 2, 3, 7]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert [int(batch["input_ids"][0, 0]) for batch in resumed] == [8, 9]


def test_a_loader_over_other_samplers_says_so() -> None:
    with pytest.raises(TypeError, match="not BatchSampler"):
        DataLoader([1, 2, 3]).skip_steps([0])
