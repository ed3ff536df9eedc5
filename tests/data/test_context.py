"""Slices of context-parallel ranks: by hand, and as a partition of the batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.context import context_slice
from multipack.data.dataset import TokenDataset
from multipack.order.batch import BatchIndices


def batch_of(*bins, **options):
    """A batch of bins of sequences of these lengths, with tokens 1, 2, 3, ... through all of them."""
    lengths = [n for ns in bins for n in ns]
    ends = np.cumsum([0, *lengths]).tolist()
    rows = [{"input_ids": list(range(a + 1, b + 1))} for a, b in pairwise(ends)]
    offsets = np.cumsum([0, *map(len, bins)]).tolist()
    return PackedCollator(**options)(TokenDataset(rows).__getitems__(BatchIndices(range(len(rows)), offsets)))


def slices(batch, cp_size, layout):
    return [context_slice(batch, rank, cp_size, layout=layout) for rank in range(cp_size)]


def numbered(batch):
    """The batch with a tensor that says which slot is which."""
    shape = batch["input_ids"].shape
    return {**batch, "slot": torch.arange(shape.numel()).view(shape)}


# By hand.


def test_labels_are_shifted_before_the_cut():
    # huggingface/transformers 36607: shifted after the cut, rank 0 would lose the label 5 of its last slot.
    first, second = slices(batch_of([8]), 2, "contiguous")
    assert first["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert first["shift_labels"].tolist() == [[2, 3, 4, 5]]
    assert second["shift_labels"].tolist() == [[6, 7, 8, -100]]
    assert second["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert "labels" not in first
    assert (first["num_target_tokens"], second["num_target_tokens"]) == (4, 3)


def test_zigzag_cuts_each_sequence():
    # NVIDIA/TransformerEngine's order: sequences of 5 and 3 tokens, 2 ranks: 8 + 4 slots, chunks of 2 and of
    # 1.
    batch = batch_of([5, 3], align_to=4)
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12]
    assert batch["cu_seq_lens_real"].tolist() == [0, 5, 8]
    first, second = slices(numbered(batch), 2, "zigzag")
    assert first["slot"].tolist() == [[0, 1, 6, 7, 8, 11]]
    assert second["slot"].tolist() == [[2, 3, 4, 5, 9, 10]]
    for part in (first, second):
        assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == [0, 4, 6]
        assert part["cu_seq_lens_q"].dtype == torch.int32
        assert part["global_cu_seq_lens"].tolist() == [0, 8, 12]
        assert part["cu_seq_lens_real"].tolist() == [0, 5, 8]
        assert (part["max_length_q"], part["max_length_k"], part["global_max_length"]) == (4, 4, 8)
        assert (part["num_tokens"], part["num_sequences"]) == (8, 2)
    assert first["input_ids"].tolist() == [[1, 2, 0, 0, 6, 0]]
    assert first["shift_labels"].tolist() == [[2, 3, -100, -100, 7, -100]]
    assert second["shift_labels"].tolist() == [[4, 5, -100, -100, 8, -100]]


def test_boundaries_of_a_contiguous_slice_start_at_zero():
    # PrimeIntellect-ai/prime-rl 2392: the second of two ranks had boundaries [1024, 3072] for 1024 tokens.
    first, second = slices(batch_of([1500, 548]), 2, "contiguous")
    assert first["cu_seq_lens_q"].tolist() == [0, 1024]
    assert second["cu_seq_lens_q"].tolist() == [0, 476, 1024]
    assert first["global_cu_seq_lens"].tolist() == second["global_cu_seq_lens"].tolist() == [0, 1500, 2048]
    assert (first["max_length_q"], first["global_max_length"]) == (1024, 1500)


def test_the_example_of_the_docstring():
    batch = numbered(batch_of([5, 3], align_to=4))
    first, second = slices(batch, 2, "contiguous")
    assert first["slot"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert first["cu_seq_lens_q"].tolist() == [0, 6]
    assert second["cu_seq_lens_q"].tolist() == [0, 2, 6]


def test_rows_are_cut_each():
    # Two rows of 8 slots: 3 + 2 tokens and 3 slots of padding; 8 tokens.
    first, second = slices(numbered(batch_of([3, 2], [8], layout="rows", capacity=8)), 2, "contiguous")
    assert first["slot"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert second["slot"].tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert first["cu_seq_lens_q"].tolist() == [0, 3, 4, 8]
    assert second["cu_seq_lens_q"].tolist() == [0, 1, 4, 8]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_slices_of_static_batches_have_one_shape(layout):
    options = {
        "capacity": 16,
        "pad_to": "capacity",
        "static": True,
        "max_sequences_per_bin": 3,
        "align_to": 4,
    }
    batches = [
        batch_of([5, 3], [16], bins_per_batch=2, block_mask=4, **options),
        batch_of([1], bins_per_batch=2, block_mask=4, **options),
    ]
    shapes = {
        str(
            [
                (name, value.shape if isinstance(value, torch.Tensor) else value)
                for name, value in part.items()
                if not name.startswith("num_")
            ]
        )
        for batch in batches
        for part in slices(batch, 2, layout)
    }
    assert len(shapes) == 1
    # 2 bins of 3 sequences and padding; [0, 8, 12, 28, 32] are the segments of the first batch.
    first, second = slices(batches[0], 2, layout)
    halves = {
        "zigzag": ([0, 4, 6, 14, 16, 16, 16, 16, 16], [0, 4, 6, 14, 16, 16, 16, 16, 16]),
        "contiguous": ([0, 8, 12, 16, 16, 16, 16, 16, 16], [0, 0, 0, 12, 16, 16, 16, 16, 16]),
    }
    assert first["cu_seq_lens_q"].tolist() == halves[layout][0]
    assert second["cu_seq_lens_q"].tolist() == halves[layout][1]


# As a partition.


@st.composite
def _cases(draw):
    cp_size = draw(st.integers(1, 4))
    layout = draw(st.sampled_from(["zigzag", "contiguous"]))
    align_to = 2 * cp_size if layout == "zigzag" else draw(st.sampled_from([1, 3]))
    bins = draw(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=3))
    stored = max(sum(-(-n // align_to) * align_to for n in ns) for ns in bins)
    multiple = 2 * cp_size
    capacity = (-(-stored // multiple) + draw(st.integers(0, 2))) * multiple
    static = {"static": True, "max_sequences_per_bin": 5, "bins_per_batch": 3}
    shape = draw(
        st.sampled_from(
            [
                {"pad_to": multiple},
                {"pad_to": "capacity", "capacity": capacity},
                {"pad_to": "capacity", "capacity": capacity, **static},
                {"layout": "rows", "capacity": capacity},
                {"layout": "rows", "capacity": capacity, **static},
            ]
        )
    )
    return bins, cp_size, layout, {"align_to": align_to, **shape}


@given(_cases())
def test_slices_are_a_partition_of_the_batch(case):
    bins, cp_size, layout, options = case
    batch = numbered(batch_of(*bins, **options))
    parts = slices(batch, cp_size, layout)
    rows, slots = batch["input_ids"].shape
    picked = torch.cat([part["slot"].flatten() for part in parts])
    assert sorted(picked.tolist()) == list(range(rows * slots))
    boundaries = batch["cu_seq_lens_q"].tolist()
    segment_of = np.searchsorted(boundaries, np.arange(rows * slots), side="right")
    labels = batch["labels"].flatten().tolist()
    for part in parts:
        assert part["slot"].shape == (rows, slots // cp_size)
        assert (part["slot"] // slots == torch.arange(rows)[:, None]).all()
        slot = part["slot"].flatten()
        assert torch.equal(slot, slot.sort().values)
        for name in ("input_ids", "position_ids", "seq_idx"):
            assert torch.equal(part[name].flatten(), batch[name].flatten()[slot])
        for here, label in zip(slot.tolist(), part["shift_labels"].flatten().tolist(), strict=True):
            last = here + 1 == rows * slots or segment_of[here + 1] != segment_of[here]
            assert label == (-100 if last else labels[here + 1])
        local = part["cu_seq_lens_q"]
        assert (int(local[0]), int(local[-1])) == (0, len(slot))
        lengths = local.diff()[local.diff() > 0].tolist()
        assert ("static" in options) or len(lengths) == len(local) - 1
        assert max(lengths) <= part["max_length_q"]
        cuts = np.flatnonzero(np.diff(segment_of[slot], prepend=-1))
        edges = set(np.cumsum([0, *lengths]).tolist())
        assert edges == {*cuts.tolist(), len(slot)}
    targets = [part["num_target_tokens"] for part in parts]
    assert targets == [int((part["shift_labels"] != -100).sum()) for part in parts]
    assert sum(targets) == batch["num_target_tokens"]


def test_attention_of_joined_slices_is_that_of_the_sequences():
    # NVIDIA/TransformerEngine 1930: 4 and 3 tokens on 2 ranks. Each rank's queries see all keys of their
    # sequence so far.
    batch = numbered(batch_of([4, 3], align_to=4))
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 8, 16, generator=generator)
    joined = torch.empty(8, 16)
    for part in slices(batch, 2, "zigzag"):
        slot = part["slot"][0]
        keys = torch.arange(8)
        visible = (slot[:, None] // 4 == keys // 4) & (slot[:, None] >= keys)
        joined[slot] = torch.nn.functional.scaled_dot_product_attention(query[slot], key, value, visible)
    for real in (slice(0, 4), slice(4, 7)):
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[real], key[real], value[real], is_causal=True
        )
        torch.testing.assert_close(joined[real], alone)


def test_two_zigzag_slices_do_like_work():
    # Pairs of a slot and those it sees: with chunks of 1..8 rank r has r-th and last-but-r-th, equal sums.
    first, second = slices(numbered(batch_of([64])), 2, "zigzag")
    assert int((first["slot"] + 1).sum()) == int((second["slot"] + 1).sum()) == 64 * 65 // 4


# What cannot be cut.


def test_sequences_that_do_not_divide_are_refused():
    # NVIDIA/TransformerEngine 1930: 7 tokens on 2 ranks were treated as 6.
    with pytest.raises(
        ValueError, match=r"segment 1 .* has 3 slots, no multiple of 2 \* cp_size = 4.*align_to=4"
    ):
        context_slice(batch_of([4, 3]), 0, 2)
    with pytest.raises(
        ValueError, match=r"a row of the batch has 7 slots, no multiple of cp_size = 2.*pad_to=2"
    ):
        context_slice(batch_of([4, 3]), 0, 2, layout="contiguous")


@pytest.mark.parametrize(
    ("batch", "arguments", "message"),
    [
        (batch_of([8]), (2, 2), r"cp_rank 2 is outside 0\.\.1"),
        (batch_of([8]), (0, 0), "cp_size is 0"),
        (PaddedCollator()([{"input_ids": [1, 2]}]), (0, 2), "no cu_seq_lens_q"),
        (context_slice(batch_of([8]), 0, 2), (0, 2), "a slice already"),
        (
            PackedCollator()([{"input_ids": [1, 2, 3, 4], "labels": 1}]),
            (0, 2),
            r"shape \(1,\) are one a sequence",
        ),
        (batch_of([4, 4], mask_first_label=False), (0, 2), "label of slot 0, the first of its sequence"),
    ],
)
def test_batches_that_have_no_slices_are_refused(batch, arguments, message):
    with pytest.raises(ValueError, match=message):
        context_slice(batch, *arguments)


def test_layouts_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="layout 'ring' is none of 'zigzag', 'contiguous'"):
        context_slice(batch_of([8]), 0, 2, layout="ring")
