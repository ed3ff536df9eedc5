"""Tails and lengths: what every rank gets where batches do not divide among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import BatchSampler, RandomSampler

from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler
from multipack.loading.packed import packed_dataloader
from multipack.order.batch import BatchIndices
from multipack.order.dealing import Tail


def in_order(count: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(count), batch_size, drop_last)


def dealt(batch_sampler: Any, num_replicas: int, tail: Tail) -> list[list[BatchIndices]]:
    """The batches of each rank; their number is what `len` said."""
    samplers = [
        DistributedBatchSampler(batch_sampler, num_replicas=num_replicas, rank=rank, tail=tail)
        for rank in range(num_replicas)
    ]
    announced = [len(sampler) for sampler in samplers]
    ranks = [list(sampler) for sampler in samplers]
    assert [len(batches) for batches in ranks] == announced
    return ranks


def once(ranks: list[list[BatchIndices]]) -> list[int]:
    """The rows that count, in ascending order."""
    return sorted(row for batches in ranks for batch in batches if not batch.repeated for row in batch)


class Grouped:
    """Batches that never mix groups, as torchvision's; says the right length or another."""

    def __init__(self, sizes: list[int], batch_size: int, announced: int) -> None:
        self.sizes, self.batch_size, self.announced = sizes, batch_size, announced

    def __len__(self) -> int:
        return self.announced

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for size in self.sizes:
            yield from BatchSampler(range(first, first + size), self.batch_size, False)
            first += size


@pytest.mark.report("mlcommons/storage#455")
def test_every_rank_has_as_many_batches() -> None:
    # 100 samples in batches of 3 make 34 batches, 4 on each of 7 ranks and 6 left over.
    dropped = dealt(in_order(100, 3), 7, "drop")
    assert [len(batches) for batches in dropped] == [4] * 7
    assert once(dropped) == list(range(84))
    for tail in ("pad", "split"):
        kept = dealt(in_order(100, 3), 7, tail)
        assert [len(batches) for batches in kept] == [5] * 7
        assert once(kept) == list(range(100))


@pytest.mark.report("m2lines/Samudra#557")
def test_tails_of_fewer_batches_than_ranks() -> None:
    assert [len(batches) for batches in dealt(in_order(5, 1), 2, "drop")] == [2, 2]
    padded = dealt(in_order(5, 1), 2, "pad")
    assert padded == [[[0], [2], [4]], [[1], [3], [0]]]
    assert padded[1][2].repeated
    with pytest.raises(ValueError, match="has 3 batches: too few to give 4 ranks"):
        DistributedBatchSampler(in_order(3, 1), num_replicas=4, rank=0, tail="drop")
    one_each = dealt(in_order(3, 1), 4, "pad")
    assert [batches[0].repeated for batches in one_each] == [False, False, False, True]
    # So it is with bins: 5 on 2 ranks, 3 on 4 ranks. "split" splits no single sequence, so it repeats one
    # too.
    assert [len(batches) for batches in dealt(MultipackBatchSampler([9] * 5, 10), 2, "split")] == [3, 3]
    few = dealt(MultipackBatchSampler([9] * 3, 10), 4, "split")
    assert [len(batches) for batches in few] == [1] * 4
    assert once(few) == [0, 1, 2]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.report("lhotse-speech/lhotse#1277")
def test_a_tail_with_fewer_sequences_than_ranks_repeats_one_and_marks_it(packing: bool) -> None:
    def last_step(count: int) -> list[BatchIndices]:
        # Batches of 4 sequences: one micro-step of 4 ranks takes 16.
        sampler: Any = in_order(16 + count, 4)
        if packing:
            sampler = MultipackBatchSampler([1] * (16 + count), 4, shuffle=False, method="next_fit")
        ranks = dealt(sampler, 4, "split")
        assert [len(batches) for batches in ranks] == [2] * 4
        assert once(ranks) == list(range(16 + count))
        return [batches[1] for batches in ranks]

    three = last_step(3)
    assert [len(batch) for batch in three] == [1, 1, 1, 1]
    assert sum(batch.repeated for batch in three) == 1
    six = last_step(6)
    assert sorted(map(len, six)) == [1, 1, 2, 2]
    assert not any(batch.repeated for batch in six)


@pytest.mark.report("huggingface/accelerate#4122")
def test_len_is_what_every_rank_yields() -> None:
    assert [len(batches) for batches in dealt(in_order(3, 2), 2, "pad")] == [1, 1]  # batches of 2 a rank
    assert [len(batches) for batches in dealt(in_order(3, 1), 2, "pad")] == [
        2,
        2,
    ]  # 2 a micro-step, as in the report
    for count, size, ranks in itertools.product(range(1, 14), (1, 2, 3, 5), (1, 2, 3, 5)):
        for drop_last, tail in itertools.product((False, True), ("split", "pad", "drop")):
            num_batches = count // size if drop_last else -(-count // size)
            if num_batches < (ranks if tail == "drop" else 1):
                with pytest.raises(ValueError, match="batches"):
                    dealt(in_order(count, size, drop_last), ranks, tail)
                continue
            yielded = dealt(in_order(count, size, drop_last), ranks, tail)
            wanted = num_batches // ranks if tail == "drop" else -(-num_batches // ranks)
            assert [len(batches) for batches in yielded] == [wanted] * ranks


@pytest.mark.report("huggingface/accelerate#2316")
def test_repeats_are_marked() -> None:
    padded = dealt(in_order(24, 1), 5, "pad")
    assert padded[4] == [[4], [9], [14], [19], [0]]
    marks = [[batch.repeated for batch in batches] for batches in padded]
    assert marks == [[False] * 5] * 4 + [[False] * 4 + [True]]
    dropped = dealt(in_order(24, 1), 5, "drop")
    assert [len(batches) for batches in dropped] == [4] * 5
    assert once(dropped) == list(range(20))


@pytest.mark.report("huggingface/accelerate#961")
def test_no_rank_gets_an_empty_batch() -> None:
    for tail in ("pad", "split"):
        ranks = dealt(in_order(5, 1), 4, tail)
        assert [[len(batch) for batch in batches] for batches in ranks] == [[1, 1]] * 4
        assert sum(batches[1].repeated for batches in ranks) == 3
    assert [len(batches) for batches in dealt(in_order(5, 1), 4, "drop")] == [1] * 4


@pytest.mark.report("mlcommons/training#625")
def test_ranks_share_one_permutation() -> None:
    """Seeds that differ between ranks are found by `check_agreement`; see the ranks' test."""
    ranks = dealt(MultipackBatchSampler(np.full(100_000, 20), 2000, seed=3), 4, "split")
    rows = [{row for batch in batches for row in batch} for batches in ranks]
    assert (
        sum(map(len, rows)) == len(set.union(*rows)) == 100_000
    )  # independent orders would show 68 % of them
    prints = [MultipackBatchSampler(np.full(100_000, 20), 2000, seed=rank).fingerprint for rank in range(4)]
    assert len(set(prints)) == 4
    with pytest.raises(ValueError, match="RandomSampler has no generator"):
        DistributedBatchSampler(BatchSampler(RandomSampler(range(100)), 2, False), num_replicas=4, rank=0)


@pytest.mark.report("InternLM/xtuner#436")
def test_the_last_step_of_a_rounded_up_epoch() -> None:
    """The report pads by 109 samples to 8 x 16 a step; we repeat whole batches, 6 x 16, or none at all by
    default: the loss is divided by the target tokens that count, so a smaller last step weighs what it
    holds."""
    padded = dealt(in_order(10_003, 16), 8, "pad")
    assert [len(batches) for batches in padded] == [79] * 8
    assert [len(batches[78]) for batches in padded] == [16, 3] + [16] * 6
    assert [batches[78].repeated for batches in padded] == [False, False] + [True] * 6
    dropped = dealt(in_order(10_003, 16), 8, "drop")
    assert [len(batches) for batches in dropped] == [78] * 8
    assert once(dropped) == list(range(9984))
    even = dealt(in_order(10_003, 16), 8, "split")
    assert sum(len(batches[78]) for batches in even) == 19
    assert once(even) == list(range(10_003))
    assert not any(batch.repeated for batches in even for batch in batches)


@pytest.mark.report("huggingface/trl#943")
def test_len_counts_bins() -> None:
    sampler = MultipackBatchSampler([10] * 100, 40)
    loader = packed_dataloader((np.zeros(1000, np.int32), np.arange(0, 1001, 10)), 40, rank=0, num_replicas=1)
    assert len(sampler) == len(loader) == 25
    assert len(list(loader)) == 25
    for epoch in (1, 7):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler)) == 25


@pytest.mark.report("pytorch/vision#9127")
def test_the_length_of_groups_is_the_sum_of_theirs() -> None:
    # Windows are our groups: 4 and 7 rows of one token in bins of 3 make 2 + 3 bins, not ceil(11 / 3).
    plan = EpochPlan([1] * 11, 3, window=2, shuffle_block=4)
    assert [len(plan._window_of(w).rows) for w in range(plan.num_windows)] == [4, 7]
    assert len(plan) == len(plan.bins(0, 99)) == 5
    ranks = dealt(Grouped([4, 7], 3, announced=5), 2, "split")
    assert [len(batches) for batches in ranks] == [3, 3]
    assert once(ranks) == list(range(11))


@pytest.mark.parametrize("announced", [3, 4, 6])
@pytest.mark.report("huggingface/sentence-transformers#3348")
def test_an_estimated_length_is_an_error(announced: int) -> None:
    """The ranks' steps follow from the length before the first batch, so one that turns out wrong is no
    longer a detail."""
    sampler = DistributedBatchSampler(Grouped([4, 7], 3, announced), num_replicas=1, rank=0)
    found = "more" if announced < 5 else 5
    given: list[list[int]] = []
    with pytest.raises(ValueError, match=f"Grouped has a length of {announced} but gives {found} batches"):
        given.extend(sampler)
    # None beyond those that schedules know of; a batch says what comes behind it, so the error comes before
    # the last of them.
    assert len(given) == min(announced, 5) - 1
    for epoch in range(3):
        ours = MultipackBatchSampler(np.random.default_rng(0).integers(1, 9, 50), 10)
        ours.set_epoch(epoch)
        assert len(ours) == len(list(ours))


@pytest.mark.report("axolotl-ai-cloud/axolotl#1966")
def test_len_and_state_need_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any collective would raise here, because there is no group of 2; two real ranks are in
    tests/distributed."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = (np.zeros(600, np.int32), np.arange(0, 601, 3))
    loaders = [packed_dataloader(source, 16, rank=rank, num_replicas=2) for rank in (0, 1)]
    alone = loaders[0]
    # 5 rows of 3 tokens fit a bin of 16: 40 bins, 20 a rank.
    assert (len(alone), len(alone.batch_sampler)) == (20, 20)  # type: ignore[arg-type]
    assert "DataLoader" in repr(alone)
    assert alone.state_dict() == alone.state_dict()
    assert str(alone.stats)
    assert len(loaders[1]) == 20
