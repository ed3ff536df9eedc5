"""LoaderStats: each number against one worked out by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.loading.stats import LoaderStats, batch_size


def test_real_tokens_come_from_the_collator() -> None:
    assert batch_size({"input_ids": torch.zeros(1, 10, dtype=torch.int64), "num_tokens": 7}) == (7, 10, 80)


def test_or_from_the_attention_mask() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert batch_size({"input_ids": torch.zeros(2, 3, dtype=torch.int32), "attention_mask": mask}) == (
        4,
        6,
        24 + 48,
    )


def test_or_are_all_input_ids() -> None:
    assert batch_size({"input_ids": torch.zeros(2, 3, dtype=torch.int32)}) == (6, 6, 24)


def test_bytes_of_nested_tensors_count_once() -> None:
    shared = torch.zeros(5, dtype=torch.int32)
    assert batch_size([shared, (shared, {"x": torch.zeros(2, dtype=torch.float64)}, "text")]) == (
        0,
        0,
        20 + 16,
    )


def test_shares_of_a_packed_loader() -> None:
    # Six rows of 3 tokens: bins of 8 slots hold two rows each, padded to 8: 18 of 24 slots are tokens.
    rows = (np.arange(18, dtype=np.int32), np.arange(0, 19, 3))
    loader = packed_dataloader(rows, 8, pad_to="capacity", num_workers=1)
    list(loader)
    stats = loader.stats
    assert (stats.batches, stats.tokens, stats.slots, stats.bin_slots) == (3, 18, 24, 24)
    assert stats.padding_share == pytest.approx(6 / 24)
    assert stats.efficiency == pytest.approx(18 / 24)
    unpadded = packed_dataloader(rows, 8, bins_per_batch=2)
    list(unpadded)
    assert unpadded.stats.padding_share == 0.0
    assert unpadded.stats.efficiency == pytest.approx(
        18 / 24
    )  # bins are as full, whether or not the rest is computed


def test_wait_share_of_a_slow_loader_and_of_a_fast_one() -> None:
    def slow(rows: list[int]) -> list[int]:
        time.sleep(0.02)
        return rows

    loader = DataLoader(range(12), collate_fn=slow, num_workers=1, worker_type="thread")
    list(loader)
    assert loader.stats.wait_share > 0.8
    assert loader.stats.start_seconds >= 0.02
    assert loader.stats.producer_ms >= 20
    assert loader.stats.queue_occupancy < 0.3

    loader = DataLoader(range(12), num_workers=1, worker_type="thread")
    for _ in loader:
        time.sleep(0.01)
    assert loader.stats.wait_share < 0.3
    assert 0.1 <= loader.stats.loop_seconds < 1.0
    assert loader.stats.queue_occupancy > 0.3


def test_totals_go_on_over_epochs_until_reset() -> None:
    loader = DataLoader([{"input_ids": torch.ones(3)}] * 4, batch_size=2)
    for _ in range(3):
        list(loader)
    assert (loader.stats.batches, loader.stats.tokens, loader.stats.bytes) == (6, 36, 144)
    loader.stats.reset()
    assert loader.stats == LoaderStats()
    list(loader)
    assert loader.stats.batches == 2


def test_an_unused_loader_has_quiet_statistics() -> None:
    stats = DataLoader(range(3)).stats
    assert (stats.wait_share, stats.padding_share, stats.efficiency, stats.queue_occupancy) == (0, 0, 0, 0)
    assert stats.tokens_per_second == 0


def test_it_prints_as_one_readable_line() -> None:
    stats = LoaderStats(
        batches=1000,
        tokens=900_000,
        slots=1_000_000,
        bytes=24_000_000,
        bin_slots=1_000_000,
        start_seconds=0.25,
        wait_seconds=0.1,
        loop_seconds=20.0,
        producer_seconds=2.0,
        queue_length_sum=1800,
        queue_depth=2,
    )
    assert str(stats) == (
        "1,000 batches, 900,000 tokens, 24.0 MB | padding 10.00% | bin fill 90.00% | waited 0.10 s of 20.00 "
        "s (0.50%) | first batch 0.25 s | queue 90% full, 2.00 ms to make a batch"
    )
