"""Batches against plain Python, against trl's and transformers' collators, and by hand where these are
wrong."""

from __future__ import annotations

import pickle

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import column_of
from oracles import packed_batch
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.dataset import TokenDataset
from multipack.order.batch import BatchIndices


class Bins(list):
    """Row ids with what our samplers note on them."""

    def __init__(self, bins, repeated=False):
        super().__init__(row for rows in bins for row in rows)
        self.bin_offsets = tuple(np.cumsum([0, *map(len, bins)]).tolist())
        self.repeated = repeated


def ids_of(*lengths: int) -> list[dict]:
    """Rows of these lengths with tokens 1, 2, 3, ... through all of them."""
    ends = np.cumsum(lengths)
    return [{"input_ids": list(range(end - n + 1, end + 1))} for end, n in zip(ends, lengths, strict=True)]


def collate(collator, rows, bins=None, **noted):
    dataset = TokenDataset(rows)
    return collator(dataset.__getitems__(Bins(bins if bins is not None else [range(len(rows))], **noted)))


def assert_equal(batch, other):
    assert batch.keys() == other.keys()
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


# Against the oracle.


@st.composite
def _rows(draw, min_size=1):
    lengths = draw(st.lists(st.integers(1, 9), min_size=min_size, max_size=8))
    has_labels, has_mask = draw(st.booleans()), draw(st.booleans())
    tokens = st.integers(0, 100)
    labels = st.sampled_from([-100, 1, 2])
    rows = []
    for n in lengths:
        row = {"input_ids": draw(st.lists(tokens, min_size=n, max_size=n))}
        row["extra"] = draw(st.lists(st.integers(-5, 5), min_size=n, max_size=n))
        if has_labels:
            row["labels"] = draw(st.lists(labels, min_size=n, max_size=n))
        if has_mask:
            row["loss_mask"] = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        rows.append(row)
    return rows


@st.composite
def _in_bins(draw, rows):
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def table_of(data, rows):
    """The rows in a random Arrow layout, of random integer types."""
    types = {"input_ids": ["uint8", "int32", "uint16", "int64"], "loss_mask": ["bool", "int8", "float32"]}
    columns = {}
    for name in rows[0]:
        dtype = data.draw(st.sampled_from(types.get(name, ["int8", "int16", "int32", "int64"])))
        columns[name] = data.draw(column_of([np.array(row[name], dtype) for row in rows]))
    return pa.table(columns)


def assert_like_oracle(batch, expected, shape, align_to=1):
    for name in ("input_ids", "labels", "extra", "position_ids", "seq_idx"):
        assert batch[name].shape == shape
        assert batch[name].flatten().tolist() == expected[name], name
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == expected["boundaries"]
    assert batch["max_length_q"] == batch["max_length_k"] == expected["max_length"]
    for name in ("num_tokens", "num_sequences", "num_target_tokens"):
        assert batch[name] == expected[name], name
    if align_to > 1:
        assert batch["cu_seq_lens_real"].tolist() == expected["real"]
    for name in ("input_ids", "labels", "extra", "position_ids"):
        assert batch[name].dtype == torch.int64, name
    assert batch["seq_idx"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32
    assert "attention_mask" not in batch


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "pad_token_id": st.integers(0, 9),
        "ignore_index": st.sampled_from([-100, -1]),
        "mask_first_label": st.booleans(),
        "position_start": st.integers(0, 3),
        "align_to": st.integers(1, 4),
    },
)


@given(st.data(), _rows(), OPTIONS, st.booleans())
def test_flat_batches_of_random_layouts(data, rows, options, repeated):
    bins = data.draw(_in_bins(rows))
    multiple = data.draw(st.none() | st.integers(1, 20))
    align_to = options.get("align_to", 1)
    used = sum(-(-len(row["input_ids"]) // align_to) * align_to for row in rows)
    num_slots = used if multiple is None else -(-used // multiple) * multiple
    dataset = TokenDataset(table_of(data, rows))
    batch = PackedCollator(pad_to=multiple, **options)(dataset.__getitems__(Bins(bins, repeated)))
    sequences = [[rows[i] for ids in bins for i in ids]]
    expected = packed_batch(sequences, num_slots=num_slots, repeated=repeated, **options)
    assert_like_oracle(batch, expected, (1, num_slots), align_to)


@given(st.data(), _rows(), OPTIONS, st.booleans())
def test_batches_of_rows_of_random_layouts(data, rows, options, repeated):
    bins = data.draw(_in_bins(rows))
    align_to = options.get("align_to", 1)
    used = max(sum(-(-len(rows[i]["input_ids"]) // align_to) * align_to for i in ids) for ids in bins)
    capacity = used + data.draw(st.integers(0, 5))
    dataset = TokenDataset(table_of(data, rows))
    collator = PackedCollator(layout="rows", capacity=capacity, **options)
    batch = collator(dataset.__getitems__(Bins(bins, repeated)))
    expected = packed_batch(
        [[rows[i] for i in ids] for ids in bins], slots_of_bin=capacity, repeated=repeated, **options
    )
    assert_like_oracle(batch, expected, (len(bins), capacity), align_to)


@given(_rows(), OPTIONS)
def test_rows_as_dicts_give_the_batch_of_a_selection(rows, options):
    collator = PackedCollator(**options)
    selection = TokenDataset(rows).__getitems__(range(len(rows)))
    assert_equal(collator(rows), collator(selection))
    assert_equal(
        collator([dict(row) for row in selection]), collator(selection)
    )  # as a loader without __getitems__


# Against other collators, where they agree with us.


@pytest.mark.parametrize("with_labels", [True, False])
def test_flat_equals_trl_and_transformers(with_labels):
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(1, 40, 30):
        ids = rng.integers(1, 1000, length)
        labels = np.where(rng.random(length) < 0.3, -100, ids)
        rows.append({"input_ids": ids.tolist(), **({"labels": labels.tolist()} if with_labels else {})})
    batch = collate(PackedCollator(), rows)
    trl = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    assert_equal({name: batch[name] for name in trl}, trl)
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    assert_equal({name: batch[name] for name in flattening}, dict(flattening))


@pytest.mark.parametrize("multiple", [1, 8])
def test_padded_equals_trl(multiple):
    rows = ids_of(3, 7, 1)
    batch = collate(PaddedCollator(pad_token_id=9, pad_to=multiple, mask_first_label=False), rows)
    trl = DataCollatorForLanguageModeling(pad_token_id=9, pad_to_multiple_of=multiple)(rows)
    assert_equal({name: batch[name] for name in trl}, trl)


def test_positions_from_two_equal_transformers():
    # Boundaries come from the lengths, not from where a position is 0.
    rows = ids_of(3, 2)
    batch = collate(PackedCollator(position_start=2), rows)
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    other = DataCollatorWithFlattening(position_ids_start=2, return_flash_attn_kwargs=True)(rows)
    assert_equal({name: batch[name] for name in other}, dict(other))


# By hand.


@pytest.mark.report("axolotl-ai-cloud/axolotl#2739")
@pytest.mark.report("NVIDIA-NeMo/Megatron-Bridge#4400")
def test_padding_is_one_segment_of_its_own():
    # With positions 0 in the padding every slot of it would be a sequence, boundaries [0,4,7,8,9,10].
    batch = collate(PackedCollator(capacity=10, pad_to="capacity", pad_token_id=99), ids_of(4, 3))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 99, 99, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 4, -100, 6, 7, -100, -100, -100]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 7, 10]
    assert (batch["num_sequences"], batch["num_tokens"], batch["num_target_tokens"]) == (2, 7, 5)
    assert batch["max_length_q"] == 4
    assert (
        collate(PackedCollator(pad_to=12), ids_of(2, 1))["max_length_q"] == 9
    )  # the padding is the longest segment


def test_capacity_counts_for_each_bin():
    batch = collate(PackedCollator(capacity=6, pad_to="capacity"), ids_of(2, 3, 4), bins=[[0, 1], [2]])
    assert batch["input_ids"].shape == (1, 12)
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 9, 12]


def test_rows_are_padded_each():
    batch = collate(PackedCollator(layout="rows", capacity=5), ids_of(2, 2, 5), bins=[[0, 1], [2]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]
    assert batch["seq_idx"].tolist() == [[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4, 5, 10]
    assert batch["num_sequences"] == 3


@pytest.mark.report("NVIDIA-NeMo/RL#4070")
def test_aligned_sequences_have_real_and_stored_boundaries():
    # Lengths 5 and 3 aligned to 4 are stored at 0-4 and 8-10; nothing is trained at 5-7 and 11.
    batch = collate(PackedCollator(align_to=4), ids_of(5, 3))
    assert batch["cu_seq_lens_real"].tolist() == [0, 5, 8]
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12]
    assert batch["num_tokens"] == 8
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0]]
    assert torch.nonzero(batch["labels"][0] != -100).flatten().tolist() == [1, 2, 3, 4, 9, 10]


@pytest.mark.report("pytorch/torchtitan#4075")
@pytest.mark.report("meta-pytorch/torchtune#1177")
def test_no_target_crosses_from_one_sequence_into_the_next():
    # Three texts of 4, 1 and 3 tokens give 3 + 0 + 2 targets. The first token of a
    # document is no target, so the unshifted labels of [10,11,12] and [20,21] are [-100,11,12,-100,21].
    assert collate(PackedCollator(), ids_of(4, 1, 3))["num_target_tokens"] == 5
    batch = collate(PackedCollator(), [{"input_ids": [10, 11, 12]}, {"input_ids": [20, 21]}])
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21]]


@pytest.mark.report("allenai/open-instruct#669")
def test_segment_ids_hold_300_sequences():
    # Ids clamped to 0/1 or to a byte let sequences see each other.
    batch = collate(PackedCollator(), ids_of(*[2] * 300))
    assert batch["seq_idx"].unique(return_counts=True)[1].tolist() == [2] * 300


@pytest.mark.report("OpenEvaByte/evabyte#10")
def test_the_end_token_belongs_to_its_own_sequence():
    # Ours count from 0 and give the padding the next number.
    rows = [{"input_ids": [104, 105, 2]}, {"input_ids": [104, 105, 2]}]
    batch = collate(PackedCollator(pad_to=11), rows)
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize("column", ["loss_mask", "assistant_masks", "assistant_mask", "completion_mask"])
def test_masks_choose_the_targets(column):
    rows = [{"input_ids": [5, 6, 7], column: [1, 0, 1]}, {"input_ids": [8, 9], column: [0, 1]}]
    batch = collate(PackedCollator(), rows)
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, 9]]
    assert batch["num_target_tokens"] == 2
    assert column not in batch


def test_several_masks_must_all_agree():
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 0], "completion_mask": [True, True, True]}]
    assert collate(PackedCollator(), rows)["labels"].tolist() == [[-100, 6, -100]]


def test_labels_win_over_masks_which_then_come_along():
    rows = [{"input_ids": [5, 6, 7], "labels": [5, -100, 7], "loss_mask": [1, 1, 0]}]
    batch = collate(PackedCollator(), rows)
    assert batch["labels"].tolist() == [[-100, -100, 7]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0]]


@pytest.mark.report("huggingface/transformers#41652")
def test_a_label_a_sequence_is_one_tensor():
    # Integer labels of a classifier crash the flattening collator.
    rows = [{"input_ids": [0, 1, 2, 3], "labels": 1}, {"input_ids": [4, 5, 6], "labels": 0}]
    batch = collate(PackedCollator(), rows)
    assert batch["labels"].dtype == torch.int64
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 7]
    assert batch["num_target_tokens"] == 2
    assert collate(PackedCollator(), rows, repeated=True)["labels"].tolist() == [-100, -100]


def test_further_columns_come_along():
    rows = [
        {
            "input_ids": [1, 2],
            "logprobs": [-0.5, -1.0],
            "keep": [True, False],
            "reward": 0.25,
            "chosen": True,
            "name": "a",
        },
        {"input_ids": [3], "logprobs": [-2.0], "keep": [True], "reward": 4.0, "chosen": False, "name": "b"},
    ]
    batch = collate(PackedCollator(pad_to=4), rows)
    assert batch["logprobs"].dtype == torch.float32
    assert batch["logprobs"].tolist() == [[-0.5, -1.0, -2.0, 0.0]]
    assert batch["keep"].tolist() == [[True, False, True, False]]
    assert batch["reward"].dtype == torch.float32
    assert batch["reward"].tolist() == [0.25, 4.0]
    assert batch["chosen"].tolist() == [True, False]
    assert batch["name"] == ["a", "b"]


def test_float_and_boolean_tokens_keep_their_labels():
    floats = collate(PackedCollator(), [{"input_ids": [0.5, 1.5]}])
    assert (floats["input_ids"].tolist(), floats["labels"].tolist()) == ([[0.5, 1.5]], [[-100.0, 1.5]])
    bits = collate(PackedCollator(pad_token_id=7, pad_to=4), [{"input_ids": [True, False, True]}])
    assert (bits["input_ids"].tolist(), bits["labels"].tolist()) == ([[1, 0, 1, 7]], [[-100, 0, 1, -100]])


def test_a_repeated_batch_has_no_targets():
    batch = collate(PackedCollator(), ids_of(3, 2), repeated=True)
    assert batch["labels"].tolist() == [[-100] * 5]
    assert (batch["num_target_tokens"], batch["num_tokens"], batch["num_sequences"]) == (0, 0, 0)


def test_indices_are_rows_of_the_source():
    dataset = TokenDataset([[], [1, 2, 3], [], [4]], max_length=2, overlong="split")
    batch = PackedCollator(return_indices=True)(dataset.__getitems__([2, 1, 0]))
    assert batch["indices"].tolist() == [3, 1, 1]
    assert batch["input_ids"].tolist() == [[4, 3, 1, 2]]
    with pytest.raises(ValueError, match="do not know their row"):
        PackedCollator(return_indices=True)([{"input_ids": [1]}])


@pytest.mark.report("huggingface/transformers#46634")
def test_mask_columns_of_ones_are_not_passed_on_and_padded_rows_are_refused():
    # A mask of ones beside packed positions makes models see one long sequence.
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [3, 0], "attention_mask": [1, 0]}]
    assert "attention_mask" not in collate(PackedCollator(), rows[:1])
    for collator in (PackedCollator(), PaddedCollator()):
        with pytest.raises(
            ValueError, match=r"attention_mask is 0 in sequence 1 of the batch.*padded before"
        ):
            collate(collator, rows)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("labels", ["good", "bad"]),
        ("labels", [[[1], [2, 3]], [[3], [4]]]),
        ("loss_mask", [0, 1]),
        ("assistant_masks", ["01", "1"]),
        ("attention_mask", [1, 1]),
    ],
)
@pytest.mark.parametrize("collator", [PackedCollator(), PaddedCollator()])
def test_targets_that_are_not_one_a_token_are_refused(collator, name, values):
    rows = TokenDataset({"input_ids": [[1, 2], [3]], name: values})
    with pytest.raises(ValueError, match=f"column '{name}' has no number for each token"):
        collator(rows.__getitems__([0, 1]))


def test_columns_made_here_are_refused():
    with pytest.raises(ValueError, match="makes \\['seq_idx'\\] itself"):
        collate(PackedCollator(), [{"input_ids": [1], "seq_idx": [0]}])


def test_rows_of_mixed_integer_types_keep_their_values():
    batch = PackedCollator()(
        [{"input_ids": np.array([65535], np.uint16)}, {"input_ids": torch.tensor([70000])}]
    )
    assert batch["input_ids"].tolist() == [[65535, 70000]]


@pytest.mark.report("pytorch/pytorch#38492")
def test_rows_with_unequal_fields_are_an_error_that_names_them():
    # Torch's default collator once cut ragged fields to the shortest.
    with pytest.raises(ValueError, match="row 0 has 1 tokens but 2 values of 'x'"):
        PackedCollator()([{"input_ids": [1], "x": [1, 2]}])
    assert PackedCollator()([{"input_ids": [1], "x": ["X"]}, {"input_ids": [1], "x": ["X", "X"]}])["x"] == [
        ["X"],
        ["X", "X"],
    ]


def test_an_empty_batch_is_an_error():
    for rows in ([], [{"input_ids": []}]):
        with pytest.raises(ValueError, match="at least one sequence"):
            PackedCollator()(rows)
        with pytest.raises(ValueError, match="at least one sequence"):
            PaddedCollator()(rows)


def test_bins_above_the_capacity_are_an_error():
    with pytest.raises(ValueError, match="bin 0 of the batch takes 5 slots, above the capacity of 4"):
        collate(PackedCollator(layout="rows", capacity=4), ids_of(2, 3))
    with pytest.raises(ValueError, match="bin 1 of the batch takes 5 slots, above the capacity of 4"):
        collate(PackedCollator(capacity=4, pad_to="capacity"), ids_of(4, 5), bins=[[0], [1]])


@pytest.mark.parametrize("options", [{"layout": "rows"}, {"pad_to": "capacity"}])
def test_the_capacity_rides_with_the_bins_or_is_given(options):
    dataset = TokenDataset(ids_of(2, 3))
    with pytest.raises(ValueError, match="need the capacity of a bin in token slots"):
        PackedCollator(**options)(dataset.__getitems__([0, 1]))
    carried = PackedCollator(**options)(dataset.__getitems__(BatchIndices([0, 1], bin_capacity=8)))
    assert carried["input_ids"].shape == (1, 8)
    with pytest.raises(ValueError, match="packed with a capacity of 8 and the collator has 9"):
        PackedCollator(capacity=9, **options)(dataset.__getitems__(BatchIndices([0, 1], bin_capacity=8)))


def test_flat_batches_never_exceed_the_capacity():
    # 5 and 3 tokens fill a bin of 8, but take 8 + 4 slots when aligned to 4.
    selection = TokenDataset(ids_of(5, 3)).__getitems__(BatchIndices([0, 1], bin_capacity=8))
    assert PackedCollator()(selection)["input_ids"].shape == (1, 8)
    with pytest.raises(ValueError, match="bin 0 of the batch takes 12 slots, above the capacity of 8"):
        PackedCollator(align_to=4)(selection)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "nested"}, "layout 'nested' is none of 'flat', 'rows'"),
        ({"layout": "rows", "capacity": 4, "pad_to": 8}, "rows always have"),
        ({"pad_to": 0}, "pad_to is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"align_to": 0}, "align_to is 0"),
        ({"pad_to": "longest"}, "pad_to must be a whole number, not 'longest'"),
        ({"pad_to": 2.5}, "pad_to must be a whole number"),
        ({"pad_token_id": None}, "pad_token_id must be a whole number, not None"),
        ({"ignore_index": 0.5}, "ignore_index must be a whole number"),
        ({"position_start": None}, "position_start must be a whole number"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PackedCollator(**options)


# Padded.


@pytest.mark.parametrize(
    ("side", "ids", "mask", "labels"),
    [
        ("left", [[5, 6, 2], [2, 7, 2]], [[1, 1, 1], [0, 1, 1]], [[5, 6, 2], [-100, 7, 2]]),
        ("right", [[5, 6, 2], [7, 2, 2]], [[1, 1, 1], [1, 1, 0]], [[5, 6, 2], [7, 2, -100]]),
    ],
)
@pytest.mark.report("hpcaitech/ColossalAI#4193")
def test_an_end_token_equal_to_the_padding_counts(side, ids, mask, labels):
    # The report's labels keep the first of a row, which ours ignore by default.
    rows = [{"input_ids": [5, 6, 2]}, {"input_ids": [7, 2]}]
    batch = collate(PaddedCollator(padding_side=side, pad_token_id=2, mask_first_label=False), rows)
    assert batch["input_ids"].tolist() == ids
    assert batch["attention_mask"].tolist() == mask
    assert batch["labels"].tolist() == labels
    default = collate(PaddedCollator(padding_side=side, pad_token_id=2), rows)
    assert default["num_target_tokens"] == 3


def test_padding_on_the_left_comes_with_positions_that_start_at_the_first_token():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    assert collate(PaddedCollator(padding_side="left"), rows)["position_ids"].tolist() == [
        [0, 1, 2],
        [0, 0, 0],
    ]
    wider = collate(PaddedCollator(padding_side="left", pad_to=4), rows)["position_ids"]
    assert wider.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert "position_ids" not in collate(PaddedCollator(), rows)


@given(st.data(), _rows(), st.sampled_from(["left", "right"]))
def test_padded_and_packed_batches_have_the_same_targets(data, rows, side):
    dataset = TokenDataset(table_of(data, rows))
    ids = data.draw(st.permutations(range(len(rows))))
    packed = PackedCollator()(dataset.__getitems__(ids))
    padded = PaddedCollator(padding_side=side)(dataset.__getitems__(ids))
    real = padded["attention_mask"].bool()
    assert real.sum(1).tolist() == [len(rows[i]["input_ids"]) for i in ids]
    for name in ("input_ids", "labels", "extra"):
        assert torch.equal(padded[name][real], packed[name][0])
        assert set(padded[name][~real].tolist()) <= {-100 if name == "labels" else 0}
    for name in ("num_tokens", "num_sequences", "num_target_tokens"):
        assert padded[name] == packed[name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_side": "both"}, "padding_side 'both' is none of 'right', 'left'"),
        ({"pad_to": 0}, "pad_to is 0"),
        ({"pad_to": 2.5}, "pad_to must be a whole number"),
        ({"pad_token_id": None}, "pad_token_id must be a whole number, not None"),
    ],
)
def test_padded_options_that_make_no_sense(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PaddedCollator(**options)


@pytest.mark.parametrize("options", [{"pad_to": 8}, {"pad_to": "capacity"}, {"layout": "rows"}])
def test_numbers_of_numpy_are_those_of_python(options):
    ours = {name: np.int64(value) if isinstance(value, int) else value for name, value in options.items()}
    got = collate(PackedCollator(capacity=np.int64(5), pad_token_id=np.int32(7), **ours), ids_of(2, 3))
    expected = collate(PackedCollator(capacity=5, pad_token_id=7, **options), ids_of(2, 3))
    assert got.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(got[name]), torch.as_tensor(expected[name])) for name in got)


# In torch's loader.


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_plain_torch_loader_gives_the_same_batches(tmp_path, num_workers):
    datasets.Dataset.from_list(ids_of(*range(1, 30))).save_to_disk(tmp_path)
    dataset = TokenDataset(datasets.load_from_disk(tmp_path))
    collator = pickle.loads(pickle.dumps(PackedCollator(layout="rows", capacity=40, return_indices=True)))
    batches = [Bins([[1, 2, 3], [28]]), Bins([[5], [6, 7]]), Bins([[4, 0]], repeated=True)]
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=batches, collate_fn=collator, num_workers=num_workers
    )
    for batch, ids in zip(loader, batches, strict=True):
        assert_equal(batch, collator(dataset.__getitems__(ids)))


def test_a_batch_does_not_change_when_the_next_is_made():
    dataset = TokenDataset(ids_of(3, 2))
    first = PackedCollator()(dataset.__getitems__([0]))
    PackedCollator()(dataset.__getitems__([1]))
    assert first["input_ids"].tolist() == [[1, 2, 3]]


def test_sequences_numbered_by_a_mask_are_refused():
    with pytest.raises(ValueError, match="attention_mask has values up to 2, which number sequences"):
        PackedCollator()([{"input_ids": [1, 2, 3], "attention_mask": [1, 2, 2]}])
