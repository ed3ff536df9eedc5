"""examples/dpo_packed.py: the loss of packed pairs is that of separate pairs, on any number of ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

EXAMPLE = Path(__file__).parents[2] / "examples" / "dpo_packed.py"


def losses(num_pairs: int, capacity: int, **options: Any) -> tuple[float, float, list[int]]:
    """The mean over all ranks of packed and of separate pairs, and the pairs of this rank's batches."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    rows = example["preference_rows"](num_pairs)
    with torch.random.fork_rng():
        policy, reference = example["models"]()
    loader = example["pair_loader"](rows, capacity, **options)
    counts = [batch["num_sequences"] // 2 for batch in example["pair_loader"](rows, capacity, **options)]
    packed = example["packed_mean"](policy, reference, loader)
    return packed, example["separate_mean"](policy, reference, rows), counts


def _rank(rank: int, store: str, answers: Any, num_pairs: int, capacity: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    answers[rank] = losses(num_pairs, capacity)
    dist.destroy_process_group()


def test_one_rank() -> None:
    packed, separate, counts = losses(37, 96, rank=0, num_replicas=1)
    assert packed == pytest.approx(separate, abs=1e-6)
    assert sum(counts) == 37
    assert max(counts) > 1


@pytest.mark.parametrize(("num_pairs", "capacity"), [(5, 512), (23, 96), (1, 64)])
def test_two_ranks(tmp_path: Path, num_pairs: int, capacity: int) -> None:
    # Five pairs that fit one bin are split 3 + 2; a single pair is repeated on the other rank, and counts
    # once.
    with mp.get_context("spawn").Manager() as manager:
        answers = manager.dict()
        mp.spawn(_rank, (str(tmp_path / "store"), answers, num_pairs, capacity), nprocs=2)
        (packed, separate, first), (same, _, second) = answers[0], answers[1]
    assert packed == same == pytest.approx(separate, abs=1e-6)
    assert sum(first) + sum(second) == num_pairs
    assert len(first) == len(second)
    if num_pairs == 5:
        assert sorted([*first, *second]) == [2, 3]
