"""Sizes of micro-batches in PPO."""

from __future__ import annotations

import numpy as np
import pytest

from multipack.train.config import load_config
from multipack.train.ppo.update_plan import plan_step


@pytest.mark.report("OpenRLHF/OpenRLHF#397")
def test_batch_sizes_follow_from_each_other() -> None:
    """Micro-batches are bounded by tokens, not counted in sequences, so 100 sequences on 8 ranks are no error here: they are spread
    over equal numbers of micro-batches. For SFT there is no global size that could contradict the others."""
    lengths = np.full(128, 10)
    plan = plan_step(lengths, np.arange(128), micro_batch_tokens=20, num_replicas=8, hidden_size=64)
    assert [[len(rows) for rows in step] for step in plan.micro_batches] == [[2] * 8] * 8
    plan = plan_step(lengths, np.arange(100), micro_batch_tokens=20, num_replicas=8, hidden_size=64)
    assert len(plan) == 7  # 50 bins of two, on 8 ranks
    assert all(1 <= len(rows) <= 2 for step in plan.micro_batches for rows in step)
    assert sorted(row for step in plan.micro_batches for rows in step for row in rows) == list(range(100))
    with pytest.raises(ValueError, match="train_batch_size is not a key"):
        load_config(["--train_batch_size", "128"])
