"""Weights of the loss beside the labels, and the sums they are divided by."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from multipack import PackedCollator, PaddedCollator, TokenDataset, optimizer_steps, packed_dataloader
from multipack.data.context import context_slice
from multipack.order.batch import BatchIndices


def collated(rows: Any, kind: str, collator: Any = PackedCollator, **more: Any) -> dict[str, Any]:
    dataset = TokenDataset(rows)
    return collator(loss_weights=kind, **more)(dataset.__getitems__(BatchIndices(range(len(dataset)))))


# 8 and 3 tokens: the first of a sequence is no target, so 7 and 2 targets.
ROWS = [{"input_ids": list(range(8)), "w": 0.625}, {"input_ids": [1, 2, 3], "w": 2.5}]


@pytest.mark.parametrize("options", [{}, {"pad_to": 16}, {"align_to": 4}])
def test_sequences_count_alike(options: dict[str, Any]) -> None:
    batch = collated(ROWS, "sequences", **options)
    weights = batch["loss_weights"]
    assert weights.dtype == torch.float32
    assert weights.shape == batch["labels"].shape
    assert torch.equal(weights != 0, batch["labels"] != -100)
    assert weights[weights != 0].tolist() == pytest.approx([1 / 7] * 7 + [1 / 2] * 2)
    assert batch["sum_loss_weights"] == pytest.approx(2)


def test_the_weights_of_a_step_sum_to_one() -> None:
    # Liger-Kernel#329: 7 and 2 targets count 1/14 and 1/4 each.
    loader = packed_dataloader(
        ROWS, 11, shuffle=False, loss_weights="sequences", rank=0, num_replicas=1, columns=["input_ids"]
    )
    (step,) = optimizer_steps(loader)
    weights = step[0]["loss_weights"] / step.loss_divisor
    assert sorted(weights[weights != 0].tolist()) == pytest.approx([1 / 14] * 7 + [1 / 4] * 2)
    assert float(weights.sum()) == pytest.approx(1)


def test_a_column_of_one_weight_a_sequence() -> None:
    # Sources with shares q of .8 and .2 that are to count w = .5 each: w / q is .625 and 2.5.
    batch = collated(ROWS, "w")
    weights = batch["loss_weights"]
    assert weights[weights != 0].tolist() == [0.625] * 7 + [2.5] * 2
    assert batch["sum_loss_weights"] == 7 * 0.625 + 2 * 2.5
    assert batch["w"].tolist() == [0.625, 2.5]


@pytest.mark.parametrize("collator", [PackedCollator, PaddedCollator])
def test_a_column_of_one_weight_a_token(collator: Any) -> None:
    rows = [{"input_ids": [1, 2, 3], "w": [9.0, 0.5, 0.0]}, {"input_ids": [4, 5], "w": [9.0, 2.0]}]
    batch = collated(rows, "w", collator)
    assert batch["loss_weights"].flatten()[:5].tolist() == [0, 0.5, 0, 0, 2]
    assert batch["sum_loss_weights"] == 2.5


def test_tokens_count_alike_and_repeats_for_nothing() -> None:
    assert collated(ROWS, "tokens")["sum_loss_weights"] == 9
    dataset = TokenDataset(ROWS)
    repeat = PackedCollator(loss_weights="sequences")(dataset.__getitems__(BatchIndices([0, 1]).as_repeat()))
    assert repeat["sum_loss_weights"] == 0
    assert not repeat["loss_weights"].any()


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="neither 'sequences' nor 'tokens' nor a column"):
        collated(ROWS, "weight")
    for bad in (-1.0, math.nan, math.inf):
        rows = [{"input_ids": [1, 2], "w": 1.0}, {"input_ids": [1, 2], "w": bad}]
        with pytest.raises(ValueError, match="column 'w' gives a target of sequence 1"):
            collated(rows, "w")
    with pytest.raises(ValueError, match="one a sequence"):
        collated([{"input_ids": [1, 2], "labels": 1}], "tokens")
    with pytest.raises(ValueError, match="loss_weights, which slices do not carry"):
        context_slice(collated(ROWS, "tokens", pad_to=4), 0, 2)


LENGTHS = np.random.default_rng(4).integers(2, 30, 61)


def _rank(rank: int, store: str, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    answers[rank] = _divided(rank, 2)
    dist.destroy_process_group()


def _divided(rank: int, ranks: int) -> list[tuple[float, float]]:
    """Of each step: what its weights are divided by over all ranks, and this rank's share of the divided
    weights."""
    loader = packed_dataloader(
        [list(range(n)) for n in LENGTHS],
        32,
        accumulate=3,
        loss_weights="sequences",
        rank=rank,
        num_replicas=ranks,
    )
    return [
        (
            step.loss_divisor * ranks,
            sum(float(b["loss_weights"].double().sum()) for b in step) / (step.loss_divisor * ranks),
        )
        for step in optimizer_steps(loader)
    ]


def test_sums_are_those_of_the_step_over_ranks_and_micro_steps(tmp_path: Any) -> None:
    with mp.get_context("spawn").Manager() as manager:
        answers = manager.dict()
        mp.spawn(_rank, (str(tmp_path / "store"), answers), nprocs=2)
        first, second = answers[0], answers[1]
    assert [divisor for divisor, _ in first] == [divisor for divisor, _ in second]
    assert sum(divisor for divisor, _ in first) == pytest.approx(61)  # every sequence counts 1
    assert [a + b for (_, a), (_, b) in zip(first, second, strict=True)] == pytest.approx([1] * len(first))
