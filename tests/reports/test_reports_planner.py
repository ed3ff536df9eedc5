"""Public bug reports on packing and planning. The name of a test is repository and number; numbers are the report's or smaller ones."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multipack import DistributedBatchSampler, EpochPlan, MultipackBatchSampler, pack
from multipack.data.collate import PackedCollator
from multipack.data.dataset import Selection, TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.order.packing import MethodName, Packing

METHODS: tuple[MethodName, ...] = ("auto", "stream", "best_fit_decreasing", "next_fit")


def rows_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of these lengths; token k of all is k + 1, so that a token says where it came from."""
    return np.arange(1, sum(lengths) + 1, dtype=np.int32), np.concatenate(([0], np.cumsum(lengths)))


def contents(packing: Packing) -> list[list[int]]:
    """The lengths in each bin, longest first, bins in ascending order."""
    return sorted(sorted(packing.lengths[packing[b]].tolist(), reverse=True) for b in range(len(packing)))


def fragments(dataset: TokenDataset) -> list[tuple[int, int, int]]:
    """Row, first token and end of each sequence."""
    return [
        (int(row), int(start), int(start + length))
        for row, start, length in zip(dataset.rows, dataset.starts, dataset.lengths, strict=True)
    ]


def test_axolotl_3848_a_dropped_short_batch_leaves_the_slot_count() -> None:
    """No batch at all is an error at construction here, where the report accepts an empty loader that says so."""
    loader = DataLoader(
        TokenDataset(rows_of([6, 6, 6])),
        batch_sampler=MultipackBatchSampler([6, 6, 6], 10, bins_per_batch=2, drop_last=True),
        collate_fn=PackedCollator(),
    )
    assert len(loader) == len(list(loader)) == 1
    assert (loader.stats.bin_slots, loader.stats.tokens, loader.stats.efficiency) == (20, 12, 0.6)
    with pytest.raises(ValueError, match="1 bins do not fill one batch of bins_per_batch=2"):
        MultipackBatchSampler([6], 10, bins_per_batch=2, drop_last=True)
    with pytest.raises(ValueError, match="no sequences to pack"):
        MultipackBatchSampler([], 10, bins_per_batch=2, drop_last=True)
    for method in METHODS:
        assert (len(pack([], 10, method=method)), pack([], 10, method=method).efficiency) == (0, 0.0)
    assert (len(EpochPlan([], 10)), EpochPlan([], 10).efficiency, EpochPlan([], 10).bins(0, 5)) == (
        0,
        0.0,
        [],
    )


def test_axolotl_1516_default_packing_reaches_the_lower_bound_where_next_fit_wastes_a_tenth() -> None:
    lengths = [7, 6, 5, 4, 3, 7, 6, 5, 4, 3]
    best = pack(lengths, 10)
    assert (len(best), best.efficiency, best.lower_bound) == (5, 1.0, 5)
    assert contents(best) == [[5, 5], [6, 4], [6, 4], [7, 3], [7, 3]]
    assert len(pack(lengths, 10, method="next_fit")) == 7
    # The report's 721 -> 650 steps at 0.898 -> 0.998, on lengths for which next-fit fills about nine tenths.
    long = np.random.default_rng(0).integers(1, 501, 20_000)
    in_order, ours = pack(long, 1536, method="next_fit"), pack(long, 1536)
    assert 0.88 < in_order.efficiency < 0.91
    assert ours.efficiency > 0.998
    assert len(ours) / len(in_order) == pytest.approx(in_order.efficiency / 0.999, rel=0.002)


@pytest.mark.parametrize("method", METHODS)
def test_trl_3887_capacity_need_not_be_a_power_of_two(method: MethodName) -> None:
    assert len(pack([4096] * 4, 8192, method=method)) == 2
    assert len(pack([4096] * 4, 8193, method=method)) == 2
    assert [len(pack([3] * 6, capacity, method=method)) for capacity in (8, 9, 10)] == [3, 2, 2]
    bins = [len(pack([3] * 60, capacity, method=method)) for capacity in range(3, 190)]
    assert bins == sorted(bins, reverse=True)


def test_trl_5075_fragments_only_on_request_and_known_by_row_and_start() -> None:
    """Our default refuses over-long rows: neither fragments nor lost tokens unless somebody asked for them."""
    source = rows_of([13, 11])
    with pytest.raises(ValueError, match=r"2 of 2 rows are above max_length=10 .* longest has 13 tokens"):
        TokenDataset(source, max_length=10)
    cut = TokenDataset(source, max_length=10, overlong="truncate")
    assert (cut.lengths.tolist(), cut.report.overlong_sequences, cut.report.lost_tokens) == ([10, 10], 2, 4)
    assert contents(pack(cut.lengths, 10)) == [[10], [10]]
    split = TokenDataset(source, max_length=10, overlong="split")
    assert fragments(split) == [(0, 0, 10), (0, 10, 13), (1, 0, 10), (1, 10, 11)]
    assert contents(pack(split.lengths, 10)) == [[3, 1], [10], [10]]
    assert split.report.lost_tokens == 0


def test_trl_5189_splitting_is_right_around_empty_rows() -> None:
    split = TokenDataset(rows_of([5, 0, 3]), max_length=4, overlong="split")
    assert fragments(split) == [(0, 0, 4), (0, 4, 5), (2, 0, 3)]
    assert [split[i]["input_ids"].tolist() for i in range(3)] == [[1, 2, 3, 4], [5], [6, 7, 8]]
    assert contents(pack(split.lengths, 4)) == [[3, 1], [4]]
    only = TokenDataset(rows_of([0, 0, 3]), max_length=4, overlong="split")
    assert (fragments(only), only.report.empty_sequences) == ([(2, 0, 3)], 2)
    assert contents(pack(only.lengths, 4)) == [[3]]


@pytest.mark.parametrize("method", METHODS)
def test_llamafactory_4188_a_few_short_rows_still_make_a_bin(method: MethodName) -> None:
    loader = packed_dataloader(rows_of([3, 2]), 8, method=method, pad_to="capacity", rank=0, num_replicas=1)
    (batch,) = loader
    assert (batch["num_sequences"], batch["num_tokens"], batch["input_ids"].numel()) == (2, 5, 8)
    assert (loader.stats.slots - loader.stats.tokens) == 3


def test_torchtune_1689_rows_beyond_twice_the_capacity_split() -> None:
    """Positions restart with each fragment: a fragment is a sequence of its own."""
    split = TokenDataset(rows_of([121]), max_length=60, overlong="split")
    assert split.lengths.tolist() == [60, 60, 1]
    assert len(pack(split.lengths, 60)) == 3
    collate = PackedCollator(capacity=60, pad_to="capacity")
    positions = [collate(split.__getitems__([i]))["position_ids"][0].tolist() for i in range(3)]
    assert positions[:2] == [list(range(60))] * 2
    last = collate(split.__getitems__([2]))
    assert last["position_ids"][0, 0] == 0
    assert last["cu_seq_lens_q"].tolist() == [
        0,
        1,
        60,
    ]  # one token, and the 59 of padding see only each other
    assert last["num_tokens"] == 1
    many = TokenDataset(rows_of([30] * 10 + [61]), max_length=60, overlong="split")
    assert many.lengths.tolist() == [30] * 10 + [60, 1]
    assert len(pack(many.lengths, 60)) == 7


@pytest.mark.parametrize("method", METHODS)
def test_trl_1850_short_rows_stay_whole_and_no_remainder_is_lost(method: MethodName) -> None:
    """Rows are packed whole here; there is no mode that concatenates everything and cuts blocks."""
    split = TokenDataset(rows_of([6, 3]), max_length=4, overlong="split")
    assert fragments(split) == [(0, 0, 4), (0, 4, 6), (1, 0, 3)]
    assert (split.report.num_tokens, split.report.lost_tokens) == (9, 0)
    assert contents(pack(split.lengths, 4, method=method)) == [[2], [3], [4]]


@pytest.mark.parametrize("method", METHODS)
def test_binpacking_15_nothing_that_fits_means_no_bin_not_an_empty_one(method: MethodName) -> None:
    def bins(overlong: Any) -> list[list[int]]:
        dataset = TokenDataset(rows_of([24, 42]), max_length=20, overlong=overlong)
        return contents(pack(dataset.lengths, 20, method=method))

    assert bins("drop") == []
    assert bins("truncate") == [[20], [20]]
    # Next-fit, which keeps the order 20, 4, 20, 20, 2, cannot bring 4 and 2 together.
    alone = [[2], [4], [20], [20], [20]]
    assert bins("split") == (alone if method == "next_fit" else [[4, 2], [20], [20], [20]])
    assert contents(pack([], 20, method=method)) == []


def sparse_file(path: Path, dtype: str, size: int) -> np.memmap:
    """A file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(size * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=(size,))


def test_megatron_lm_1672_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    # Row 1 begins at byte 2 * 2,000,000,000 = 4,000,000,000, which int32 would call -294,967,296.
    values = sparse_file(tmp_path / "tokens", "uint16", 2_000_000_005)
    values[-5:] = [1, 2, 3, 4, 65535]
    lengths = np.array([2_000_000_000, 5], np.int32)
    dataset = TokenDataset((values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))))
    assert dataset.lengths.tolist() == [2_000_000_000, 5]
    assert dataset.report.num_tokens == 2_000_000_005
    assert dataset[1]["input_ids"].tolist() == [1, 2, 3, 4, 65535]
    assert PackedCollator()(dataset.__getitems__([1]))["input_ids"].tolist() == [[1, 2, 3, 4, 65535]]


def test_vllm_16806_row_times_stride_beyond_int32(tmp_path: Path) -> None:
    # Row 598 of stride 3,600,000 begins at 2,152,800,000; int32 makes that -2,142,167,296.
    stride = 3_600_000
    values = sparse_file(tmp_path / "tokens", "uint8", 599 * stride)
    values[598 * stride : 598 * stride + 3] = [7, 8, 9]
    dataset = TokenDataset((values, np.arange(600) * stride), max_length=3, overlong="truncate")
    assert dataset[598]["input_ids"].tolist() == [7, 8, 9]
    # As many bins of that capacity as rows would need more slots than int32 boundaries can name: an error, no wrap.
    selection = Selection(dataset, np.arange(599), range(600), repeated=False)
    with pytest.raises(ValueError, match=r"2156400000 slots in one batch are above 2\^31 - 1"):
        PackedCollator(layout="rows", capacity=stride)(selection)


@pytest.mark.parametrize("method", METHODS)
def test_axolotl_3307_the_limit_of_sequences_a_bin_is_the_users(method: MethodName) -> None:
    def sizes(limit: int | None) -> list[int]:
        return np.diff(pack([1] * 1000, 4096, method=method, max_sequences_per_bin=limit).offsets).tolist()

    assert sizes(None) == [1000]
    assert sizes(200) == [200] * 5
    assert sizes(1) == [1] * 1000
    sampler = MultipackBatchSampler([1] * 1000, 4096, max_sequences_per_bin=200, method=method)
    assert len(sampler) == len(list(sampler)) == 5


@pytest.mark.parametrize("method", METHODS)
def test_360_llama_factory_27_place_in_the_epoch_says_nothing_of_length(method: MethodName) -> None:
    lengths = np.random.default_rng(0).integers(1, 101, 1000)
    plans = [EpochPlan(lengths, 256, epoch=epoch, method=method) for epoch in range(12)]
    bins = [[rows.tolist() for rows in plan.bins(0, len(plan))] for plan in plans]
    # Chance alone gives the 200 bins of one epoch a correlation of 0.07, their mean over 12 epochs one of 0.02.
    correlations = [
        np.corrcoef(range(len(plan)), [lengths[rows].max() for rows in plan])[0, 1] for plan in bins
    ]
    assert abs(np.mean(correlations)) < 0.1
    assert all(sorted(row for rows in plan for row in rows) == list(range(1000)) for plan in bins)
    assert bins[0] != bins[1]
    in_bins = [{frozenset(rows) for rows in plan} for plan in bins]
    assert len(in_bins[0] & in_bins[1]) < 0.2 * len(in_bins[0])
    again = EpochPlan(lengths, 256, method=method)
    assert [rows.tolist() for rows in again.bins(0, len(again))] == bins[0]


def test_ms_swift_4340_a_million_rows_in_well_under_a_second() -> None:
    # At the report's 451 rows a second this would take 37 minutes, and its 108,919,656 rows 67 hours.
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000).astype(np.int32)
    started = time.thread_time()
    packing = pack(lengths, 4096)
    assert time.thread_time() - started < 1.0
    assert packing.indices.nbytes + packing.offsets.nbytes <= 4 * 1_000_000 + 8 * (len(packing) + 1)
    assert packing.efficiency > 0.999


def test_fms_acceleration_100_every_kind_of_integers_gives_one_plan_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = np.random.default_rng(0).integers(500, 1000, 1000)
    kinds: list[Any] = [
        *(numbers.tolist(), numbers.astype(np.int32), numbers.astype(np.int64), numbers.astype(np.uint16)),
        *(np.repeat(numbers, 2)[::2], torch.from_numpy(numbers)),
    ]
    with caplog.at_level(logging.DEBUG):
        packings = [pack(kind, 5000) for kind in kinds]
    assert len({(each.offsets.tobytes(), each.indices.tobytes()) for each in packings}) == 1
    assert caplog.records == []
    with pytest.raises(TypeError, match=r"whole numbers, not float64: row 0 is .*500\.5"):
        pack([500.5, 600.0], 5000)
    with pytest.raises(ValueError, match="row 2 has length -3"):
        pack([500, 600, -3], 5000)
    with pytest.raises(ValueError, match="row 2 has length -3"):
        DistributedBatchSampler(MultipackBatchSampler([500, 600, -3], 5000), num_replicas=1, rank=0)
