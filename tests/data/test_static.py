"""Batches of one shape: by hand, against the same batches without fixed shapes, and over whole epochs."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.order.batch import BatchIndices
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler

FLAT = {"pad_to": "capacity"}
ROWS = {"layout": "rows"}


def static(**options):
    return PackedCollator(static=True, **options)


def ids_of(*lengths: int) -> list[dict]:
    """Rows of these lengths with tokens 1, 2, 3, ... through all of them."""
    ends = np.cumsum(lengths)
    return [{"input_ids": list(range(end - n + 1, end + 1))} for end, n in zip(ends, lengths, strict=True)]


def collate(collator, rows, bins, repeated=False):
    ids = BatchIndices.of_bins(bins)
    return collator(TokenDataset(rows).__getitems__(ids.as_repeat() if repeated else ids))


def shapes(batch):
    """What a compiled step depends on: shapes and types of the tensors, and ints that are no counts."""
    tensors = {
        name: (value.dtype, tuple(value.shape))
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    counts = {"num_tokens", "num_sequences", "num_target_tokens", "num_segments", "num_bins"}
    ints = {name: value for name, value in batch.items() if isinstance(value, int) and name not in counts}
    return tensors, ints


# By hand.


@pytest.mark.parametrize("layout", [FLAT, ROWS])
def test_the_last_boundary_is_repeated(layout):
    # NVIDIA/Megatron-LM 4359, pytorch/torchtitan 4158: lengths 4 and 3 in 10 slots with room for 4 sequences.
    batch = collate(static(capacity=10, max_sequences_per_bin=4, **layout), ids_of(4, 3), [[0, 1]])
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 7, 10, 10, 10]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"], batch["num_segments"]) == (10, 10, 3)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert (batch["num_sequences"], batch["num_tokens"], batch["num_target_tokens"]) == (2, 7, 5)


def test_the_example_of_the_docstring():
    rows = [{"input_ids": ids} for ids in ([11, 12], [21], [31, 32, 33], [41])]
    options = {"capacity": 5, "max_sequences_per_bin": 3, "bins_per_batch": 2}
    batch = collate(static(**options, **FLAT), rows, [[0, 1], [2, 3]])
    assert batch["input_ids"].tolist() == [[11, 12, 21, 31, 32, 33, 41, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2, 0, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3, 6, 7, 10, 10, 10, 10]


def test_each_row_has_its_own_entries():
    # Rows of 5 slots: [2, 2 | 1 of padding], full, [1 | 4 of padding]; 3 + 1 entries a row, and the end.
    options = {"capacity": 5, "max_sequences_per_bin": 3, "bins_per_batch": 3}
    batch = collate(static(**options, **ROWS), ids_of(2, 2, 5, 1), [[0, 1], [2], [3]])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4, 5, 5, 10, 10, 10, 10, 11, 15, 15, 15]
    assert batch["num_segments"] == 6


@pytest.mark.parametrize(
    ("layout", "boundaries"),
    # 12 slots, of which 2 are used: a segment of padding is no longer than a bin, as attention was told.
    [(FLAT, [0, 2, 6, 10, 12, 12, 12]), (ROWS, [0, 2, 4, 8, 8, 12, 12])],
)
def test_missing_bins_are_padding(layout, boundaries):
    options = {"capacity": 4, "max_sequences_per_bin": 1, "bins_per_batch": 3}
    batch = collate(static(**options, **layout), ids_of(2), [[0]])
    assert batch["cu_seq_lens_q"].tolist() == boundaries
    assert batch["input_ids"].numel() == 12
    assert batch["labels"].flatten().tolist() == [-100, 2, *[-100] * 10]
    assert (batch["num_tokens"], batch["num_sequences"]) == (2, 1)


@pytest.mark.parametrize("layout", [FLAT, ROWS])
def test_one_number_a_sequence_has_room_for_all(layout):
    rows = [
        {"input_ids": [1, 2], "labels": 1, "reward": 0.5, "chosen": True},
        {"input_ids": [3], "labels": 0, "reward": 2.0, "chosen": True},
    ]
    options = {"capacity": 4, "max_sequences_per_bin": 2, "bins_per_batch": 2, "return_indices": True}
    batch = collate(static(**options, **layout), rows, [[1, 0]])
    assert batch["labels"].tolist() == [0, 1, -100, -100]
    assert batch["reward"].tolist() == [2.0, 0.5, 0.0, 0.0]
    assert batch["chosen"].tolist() == [True, True, False, False]
    assert batch["indices"].tolist() == [1, 0, -1, -1]
    assert (batch["num_sequences"], batch["num_target_tokens"]) == (2, 2)


@pytest.mark.parametrize("layout", [FLAT, ROWS])
def test_aligned_boundaries_have_room_for_all(layout):
    options = {"capacity": 12, "max_sequences_per_bin": 3, "align_to": 4}
    batch = collate(static(**options, **layout), ids_of(5, 3), [[0, 1]])
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12, 12, 12]
    assert batch["cu_seq_lens_real"].tolist() == [0, 5, 8, 8]


def test_the_longest_segment_is_rounded_up():
    # Dao-AILab/quack 150: a max_length of its own in each batch compiles each batch.
    lengths = [(3,), (512,), (513, 100)]
    found = [collate(PackedCollator(max_length_to=512), ids_of(*ns), [range(len(ns))]) for ns in lengths]
    assert [batch["max_length_q"] for batch in found] == [batch["max_length_k"] for batch in found]
    assert [batch["max_length_q"] for batch in found] == [512, 512, 1024]
    assert found[2]["cu_seq_lens_q"].tolist() == [0, 513, 613]


# Against the same batch without fixed shapes.


@st.composite
def _cases(draw):
    """Bins of lengths, and a capacity, a limit and a number of bins that hold them."""
    bins = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4))
    align_to = draw(st.sampled_from([1, 1, 3]))
    used = max(sum(-(-n // align_to) * align_to for n in lengths) for lengths in bins)
    return bins, {
        "align_to": align_to,
        "capacity": used + draw(st.integers(0, 6)),
        "max_sequences_per_bin": max(map(len, bins)) + draw(st.integers(0, 3)),
        "bins_per_batch": len(bins) + draw(st.integers(0, 2)),
    }


@given(_cases(), st.sampled_from(["flat", "rows"]), st.booleans())
def test_static_batches_hold_what_others_hold(case, layout, repeated):
    lengths_of_bins, options = case
    rows = ids_of(*[n for lengths in lengths_of_bins for n in lengths])
    ends = np.cumsum([0, *map(len, lengths_of_bins)])
    bins = [range(a, b) for a, b in pairwise(ends)]
    capacity, num_bins = options["capacity"], options["bins_per_batch"]
    batch = collate(static(**options, **(FLAT if layout == "flat" else ROWS)), rows, bins, repeated)
    plain = PackedCollator(
        layout=layout,
        capacity=capacity,
        align_to=options["align_to"],
        pad_to=num_bins * capacity if layout == "flat" else None,
    )
    expected = collate(plain, rows, bins, repeated)
    for name in ("input_ids", "labels"):
        known = expected[name].flatten()
        assert torch.equal(batch[name].flatten()[: len(known)], known)
        assert set(batch[name].flatten()[len(known) :].tolist()) <= {0 if name == "input_ids" else -100}
    boundaries = batch["cu_seq_lens_q"].numpy()
    segments = np.unique(boundaries)
    assert len(boundaries) == num_bins * (options["max_sequences_per_bin"] + 1) + 1
    assert (np.diff(boundaries) >= 0).all()
    assert np.diff(boundaries).max() <= batch["max_length_q"] == capacity
    assert (boundaries[0], boundaries[-1]) == (0, num_bins * capacity)
    assert batch["num_segments"] == len(segments) - 1
    known = expected["cu_seq_lens_q"].numpy()
    assert set(known) <= set(segments)  # and what was added lies in the padding
    assert min(set(segments) - set(known), default=np.inf) > known[:-1].max()
    positions = np.concatenate([np.arange(n) for n in np.diff(segments)])
    assert batch["position_ids"].flatten().tolist() == positions.tolist()
    for name in ("num_tokens", "num_sequences", "num_target_tokens"):
        assert batch[name] == expected[name]


# Over epochs.


@pytest.mark.parametrize("layout", [FLAT, ROWS])
@pytest.mark.parametrize("tail", ["split", "pad"])
def test_every_batch_of_every_epoch_has_one_shape(layout, tail):
    rng = np.random.default_rng(3)
    rows = [{"input_ids": rng.integers(1, 99, n).tolist(), "reward": 1.0} for n in rng.integers(1, 40, 333)]
    dataset = TokenDataset(rows)
    sampler = MultipackBatchSampler(dataset.lengths, 64, bins_per_batch=3, max_sequences_per_bin=5)
    collator = pickle.loads(
        pickle.dumps(
            static(
                capacity=64,
                max_sequences_per_bin=5,
                bins_per_batch=3,
                return_indices=True,
                block_mask=16,
                **layout,
            )
        )
    )
    seen, repeats, short = set(), 0, 0
    for epoch in range(3):
        rows_of_epoch = []
        for rank in range(4):
            dealt = DistributedBatchSampler(sampler, num_replicas=4, rank=rank, tail=tail)
            dealt.set_epoch(epoch)
            for ids in dealt.read():
                batch = collator(dataset.__getitems__(ids))
                seen.add(str(shapes(batch)))
                repeats += ids.repeated
                short += ids.num_bins < 3
                if not ids.repeated:
                    rows_of_epoch += batch["indices"][: batch["num_sequences"]].tolist()
        assert sorted(rows_of_epoch) == list(range(333))
    assert len(seen) == 1
    assert short  # the case this test is for
    assert (repeats > 0) == (tail == "pad")


def test_the_planned_limit_is_never_exceeded():
    # 10,000 rows of one token, at most 64 a bin: ceil(10,000 / 64) = 157 bins, each of which the collator
    # takes.
    dataset = TokenDataset([[1]] * 10_000)
    sampler = MultipackBatchSampler(dataset.lengths, 4096, max_sequences_per_bin=64)
    collator = static(capacity=4096, max_sequences_per_bin=64, **FLAT)
    batches = [collator(dataset.__getitems__(ids)) for ids in sampler]
    assert len(batches) == len(sampler) == 157
    assert len({str(shapes(batch)) for batch in batches}) == 1
    assert sum(batch["num_tokens"] for batch in batches) == 10_000


# What cannot be.


def test_batches_beyond_the_shape_are_refused():
    with pytest.raises(ValueError, match=r"a bin holds 3 sequences, but .* max_sequences_per_bin=2"):
        collate(static(capacity=9, max_sequences_per_bin=2, **FLAT), ids_of(1, 1, 1), [[0, 1, 2]])
    with pytest.raises(ValueError, match=r"a batch has 2 bins, but .* bins_per_batch=1"):
        collate(static(capacity=9, max_sequences_per_bin=2, **ROWS), ids_of(1, 1), [[0], [1]])
    with pytest.raises(ValueError, match="bin 0 of the batch takes 9 slots, above the capacity of 8"):
        collate(static(capacity=8, max_sequences_per_bin=2, **FLAT), ids_of(4, 5), [[0, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 8, "pad_to": "capacity"}, "static=True needs max_sequences_per_bin"),
        ({"max_sequences_per_bin": 4}, "pad_to=None: the number of slots would change"),
        ({"max_sequences_per_bin": 4, "pad_to": 8}, "pad_to=8: the number of slots would change"),
        (
            {"capacity": 8, "pad_to": "capacity", "max_sequences_per_bin": 4, "max_length_to": 8},
            "max_length_to=8 has no effect",
        ),
        ({"capacity": 8, "pad_to": "capacity", "max_sequences_per_bin": 0}, "max_sequences_per_bin is 0"),
        (
            {"capacity": 8, "pad_to": "capacity", "max_sequences_per_bin": 1, "bins_per_batch": 0},
            "bins_per_batch is 0",
        ),
    ],
)
def test_options_of_static_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        static(**options)


def test_options_of_lengths_that_make_no_sense():
    with pytest.raises(ValueError, match="max_length_to is 0"):
        PackedCollator(max_length_to=0)
