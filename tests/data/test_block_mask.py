"""Block masks against the mask of tokens x tokens, and against torch's own of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from multipack.data.block_mask import TABLES, block_mask
from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.order.batch import BatchIndices


def batch_of(bins, **options):
    """A batch of bins of sequences of these lengths."""
    lengths = [n for ns in bins for n in ns]
    ends = np.cumsum([0, *map(len, bins)])
    dataset = TokenDataset([list(range(1, n + 1)) for n in lengths])
    selection = dataset.__getitems__(BatchIndices(range(len(lengths)), ends.tolist()))
    return PackedCollator(**options)(selection)


def visible_pairs(batch):
    """Bool [rows, slots, slots]: a slot sees itself and those before it in its own segment."""
    rows, slots = batch["input_ids"].shape
    boundaries = batch["cu_seq_lens_q"].tolist()
    segment = torch.tensor([sum(b <= slot for b in boundaries[:-1]) for slot in range(rows * slots)])
    same = segment.view(rows, slots, 1) == segment.view(rows, 1, slots)
    return same & torch.ones(slots, slots, dtype=torch.bool).tril()


def kinds(mask, block):
    """0, 1 or 2 for blocks that are not, partly and wholly visible, [rows, blocks, blocks]; what is outside
    counts as not."""
    rows, slots, _ = mask.shape
    size = -(-slots // block) * block
    padded = torch.zeros(rows, size, size, dtype=torch.bool)
    padded[:, :slots, :slots] = mask
    blocks = padded.unfold(1, block, block).unfold(2, block, block).flatten(3)
    return blocks.any(-1).int() + blocks.all(-1).int()


def kinds_of_tables(mask):
    found = torch.zeros(mask.kv_indices[:, 0].shape, dtype=torch.int32)
    for kind, numbers, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row, query in np.ndindex(*found.shape[:2]):
            seen = indices[row, 0, query, : numbers[row, 0, query]].long()
            assert not found[row, query, seen].any()  # no block twice
            assert (seen.diff() > 0).all()
            found[row, query, seen] = kind
    return found


def test_two_documents():
    # 300 * 301 / 2 + 724 * 725 / 2 = 307,600 pairs; counted block by block: 11 whole and 15 partial ones.
    batch = batch_of([[300, 724]])
    pairs = visible_pairs(batch)
    assert int(pairs.sum()) == 307_600
    mask = block_mask(batch)
    assert (int(mask.full_kv_num_blocks.sum()), int(mask.kv_num_blocks.sum())) == (11, 15)
    assert mask.shape == (1, 1, 1024, 1024)
    assert torch.equal(kinds_of_tables(mask), kinds(pairs, 128))


def test_the_example_of_the_docstring():
    mask = block_mask(batch_of([[3, 5]]), block=2)
    assert kinds_of_tables(mask).tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 2, 1]]]


@st.composite
def _batches(draw):
    bins = draw(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=1, max_size=3))
    capacity = max(map(sum, bins)) + draw(st.integers(0, 20))
    options = draw(
        st.sampled_from(
            [
                {},
                {"pad_to": 8},
                {"layout": "rows", "capacity": capacity},
                {
                    "static": True,
                    "pad_to": "capacity",
                    "capacity": capacity,
                    "bins_per_batch": 3,
                    "max_sequences_per_bin": 6,
                },
                {
                    "static": True,
                    "layout": "rows",
                    "capacity": capacity,
                    "bins_per_batch": 3,
                    "max_sequences_per_bin": 6,
                },
            ]
        )
    )
    return bins, options


@given(_batches(), st.sampled_from([2, 3, 4, 8, 16]))
def test_blocks_are_those_of_the_pairs(case, block):
    bins, options = case
    batch = batch_of(bins, **options)
    mask = block_mask(batch, block)
    pairs = visible_pairs(batch)
    assert torch.equal(kinds_of_tables(mask), kinds(pairs, block))
    rows, slots = batch["input_ids"].shape
    b, q, k = torch.meshgrid(torch.arange(rows), torch.arange(slots), torch.arange(slots), indexing="ij")
    assert torch.equal(mask.mask_mod(b, torch.zeros_like(b), q, k), pairs)
    made_by_collator = block_mask(batch_of(bins, block_mask=block, **options), block)
    for name in TABLES:
        assert torch.equal(getattr(made_by_collator, name), getattr(mask, name))


@pytest.mark.parametrize("slots", [512, 500])
def test_tables_are_those_of_torch(slots):
    batch = batch_of([[100, 7, 250, 43]], pad_to=slots)
    ours = block_mask(batch, 32)
    theirs = create_block_mask(ours.mask_mod, 1, None, slots, slots, "cpu", BLOCK_SIZE=32)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for numbers, indices in (TABLES[:2], TABLES[2:], ("q_num_blocks", "q_indices")):
        count = getattr(theirs, numbers)
        assert torch.equal(getattr(ours, numbers), count)
        used = torch.arange(getattr(theirs, indices).shape[-1]) < count[..., None]
        assert torch.equal(getattr(ours, indices)[used], getattr(theirs, indices)[used])


# Compiling imports modules of torch that call its own deprecated functions.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_attention_is_that_of_each_sequence_alone():
    lengths = [40, 3, 85]
    batch = batch_of([lengths], pad_to=150, block_mask=16)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 150, 16, generator=generator) for _ in range(3))
    attend = torch.compile(
        flex_attention, dynamic=False
    )  # the compiled kernel reads the tables, the plain one does not
    found = attend(query, key, value, block_mask=block_mask(batch, 16))
    for part in torch.split(torch.arange(150), [*lengths, 22]):
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True
        )
        torch.testing.assert_close(found[:, :, part], alone)


def test_masks_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="no cu_seq_lens_q"):
        block_mask({"input_ids": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match="tables of blocks of 16 tokens, not of 128"):
        block_mask(batch_of([[4]], block_mask=16))
    with pytest.raises(ValueError, match="block_mask is 1"):
        PackedCollator(block_mask=1)
