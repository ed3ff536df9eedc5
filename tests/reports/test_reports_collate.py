"""Public bug reports on collators: labels, positions, boundaries, types. The name of a test is repository and number."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import packed as packed_by_hand
from tiny_llama import random_sequences, sequence_losses, tiny_llama

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.dataset import TokenDataset
from multipack.train.loss import causal_lm_loss_sum


def dataset(*rows: list[int], **columns: Any) -> TokenDataset:
    return TokenDataset({"input_ids": list(rows), **columns})


def collate(collator: Any, source: TokenDataset) -> dict[str, Any]:
    """All rows in one batch, as a selection; plain dicts must give the same."""
    batch: dict[str, Any] = collator(source.__getitems__(range(len(source))))
    slower = collator([source[i] for i in range(len(source))])
    assert batch.keys() == slower.keys()
    for name, value in batch.items():
        same = torch.equal(value, slower[name]) if isinstance(value, torch.Tensor) else value == slower[name]
        assert same, name
    return batch


def targets(labels: torch.Tensor) -> int:
    """Targets after the shift that models make: label t is predicted at t - 1."""
    return int((labels[..., 1:] != -100).sum())


def test_transformers_47496_positions_may_start_at_two() -> None:
    batch = collate(PackedCollator(position_start=2), dataset([1, 2, 3], [4, 5]))
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert batch["num_sequences"] == 2
    # Attention knows the sequences by their boundaries: no position is 0, and each sequence has the losses it has alone.
    model = tiny_llama(attention="eager")
    alone = sum(losses.sum().item() for losses in sequence_losses(model, [([1, 2, 3],) * 2, ([4, 5],) * 2]))
    assert causal_lm_loss_sum(tiny_llama(), batch).item() == pytest.approx(alone, abs=1e-4)


def test_colossalai_4193_an_end_token_that_equals_the_padding_counts() -> None:
    """The first label of a sequence is -100 by default, since nothing predicts it; here it is kept to match the report."""
    rows = dataset([5, 6, 2], [7, 2])
    left = collate(PaddedCollator(pad_token_id=2, padding_side="left", mask_first_label=False), rows)
    assert left["input_ids"].tolist() == [[5, 6, 2], [2, 7, 2]]
    assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert left["labels"].tolist() == [[5, 6, 2], [-100, 7, 2]]
    right = collate(PaddedCollator(pad_token_id=2, mask_first_label=False), rows)
    assert right["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert right["labels"].tolist() == [[5, 6, 2], [7, 2, -100]]
    default = collate(PaddedCollator(pad_token_id=2), rows)
    assert default["labels"].tolist() == [[-100, 6, 2], [-100, 2, -100]]
    assert default["num_target_tokens"] == 3


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_axolotl_2739_padding_is_one_segment(layout: Any) -> None:
    collator = PackedCollator(layout=layout, capacity=10, pad_to="capacity" if layout == "flat" else None)
    batch = collate(collator, dataset([1, 2, 3, 4], [5, 6, 7]))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 7, 10]
    assert batch["num_sequences"] == 2


def test_torchtitan_4075_no_token_predicts_the_next_document() -> None:
    """Labels are unshifted, as transformers' models expect."""
    batch = collate(PackedCollator(), dataset([10, 11, 12], [20, 21]))
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21]]
    assert targets(batch["labels"]) == batch["num_target_tokens"] == 3


def test_torchtune_1177_every_join_is_masked() -> None:
    batch = collate(PackedCollator(capacity=10, pad_to="capacity"), dataset([1, 2, 3, 4], [5], [6, 7, 8]))
    assert targets(batch["labels"]) == batch["num_target_tokens"] == 3 + 0 + 2
    alone = collate(PackedCollator(), dataset([5]))
    assert alone["num_target_tokens"] == 0
    loss = causal_lm_loss_sum(tiny_llama(), alone)
    assert loss.item() == 0.0


def test_transformers_41652_one_class_a_sequence() -> None:
    batch = collate(PackedCollator(), dataset([0, 1, 2, 3], [4, 5, 6], labels=[1, 0]))
    assert batch["labels"].dtype == torch.int64
    assert batch["labels"].tolist() == [1, 0]
    assert batch["input_ids"].shape == (1, 7)
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 7]


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray, np.ndarray.tolist])
def test_transformers_33946_tokenizer_output_with_a_leading_one(make: Any) -> None:
    rows = [{"input_ids": make(np.arange(length)[None])} for length in (4, 2)]
    batch = collate(PackedCollator(), TokenDataset(rows))
    for each in (batch, PackedCollator()(rows)):
        assert each["cu_seq_lens_q"].tolist() == [0, 4, 6]
        assert each["input_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]


def test_wrinklefree_monorepo_53_attention_ends_with_the_document() -> None:
    # Of 6 x 6 pairs of tokens, causal attention inside documents of 4 and 2 leaves 10 + 3.
    model = tiny_llama()
    with torch.no_grad():
        before = collate(PackedCollator(), dataset([1, 2, 3, 4], [5, 6]))
        pairs = 0
        logits = [model(**inputs(before)).logits[0]]
        for token in range(6):
            ids = before["input_ids"].clone()
            ids[0, token] += 20
            changed = model(**inputs(before) | {"input_ids": ids}).logits[0]
            pairs += int((changed != logits[0]).any(-1).sum())
            if token < 4:
                assert torch.equal(changed[4:], logits[0][4:])
    assert pairs == 13


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    counts = ("labels", "seq_idx", "num_tokens", "num_sequences", "num_target_tokens")
    return {name: value for name, value in batch.items() if name not in counts} | {"use_cache": False}


def test_evabyte_10_the_end_token_belongs_to_its_own_document() -> None:
    """`seq_idx` counts from 0 and padding is a segment of its own; the report counts from 1 and gives padding 0."""
    h, i, end = 1, 2, 3
    batch = collate(PackedCollator(capacity=11, pad_to="capacity"), dataset([h, i, end], [h, i, end]))
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]]


def test_open_instruct_669_segment_numbers_are_numbers() -> None:
    three = collate(PackedCollator(), dataset(*[[1, 2, 3]] * 3))
    assert three["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]]
    many = collate(PackedCollator(), dataset(*[[1, 2]] * 300))
    assert (many["seq_idx"].dtype, int(many["seq_idx"].max())) == (torch.int32, 299)
    assert many["num_sequences"] == 300


def test_liger_kernel_329_a_token_weighs_the_same_packed_or_not() -> None:
    """The loss is a mean over target tokens in every layout. A mean over sequences, which the report wants as an option, is not
    offered: optimizer steps would depend on how documents were cut."""
    # 8 and 3 tokens, all targets but the first ones: 7 and 2.
    sequences = [(ids, ids) for ids, _ in random_sequences([8, 3])]
    each = [losses.detach() for losses in sequence_losses(tiny_llama(attention="eager"), sequences)]
    assert [len(losses) for losses in each] == [7, 2]
    rows = dataset(*[ids for ids, _ in sequences])
    for collator, attention in ((PackedCollator(), "multipack"), (PaddedCollator(), "eager")):
        batch = collate(collator, rows)
        assert batch["num_target_tokens"] == 9
        mean = causal_lm_loss_sum(tiny_llama(attention=attention), batch).item() / batch["num_target_tokens"]
        assert mean == pytest.approx(sum(losses.sum().item() / 9 for losses in each), abs=1e-5)
        assert mean != pytest.approx(sum(losses.mean().item() / 2 for losses in each), abs=1e-3)


def test_pytorch_58734_unsigned_rows_beside_wide_ones() -> None:
    source = TokenDataset([np.array([65535], np.uint16), np.array([70000], np.int64)])
    batch = collate(PackedCollator(), source)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[65535, 70000]]
    only = collate(PackedCollator(), TokenDataset((np.array([65535, 1], np.uint16), [0, 2])))
    assert only["input_ids"].tolist() == [[65535, 1]]


def test_pytorch_38492_ragged_fields_are_not_cut() -> None:
    batch = collate(PackedCollator(), dataset([1], [2, 3], field=[["X"], ["X", "X"]]))
    assert batch["field"] == [["X"], ["X", "X"]]


def test_megatron_bridge_4400_the_number_of_segments_is_stored() -> None:
    rows = dataset([1, 2, 3, 4], [5, 6, 7])
    plain = collate(PackedCollator(), rows)
    padded = collate(PackedCollator(capacity=12, pad_to="capacity"), rows)
    assert plain["cu_seq_lens_q"].tolist() == [0, 4, 7]
    assert padded["cu_seq_lens_q"].tolist() == [0, 4, 7, 12]
    assert plain["num_sequences"] == padded["num_sequences"] == 2


def test_rl_4070_real_and_aligned_boundaries() -> None:
    """The model gets the aligned boundaries; a token after the end of its sequence attends backwards only, so it changes nothing."""
    batch = collate(PackedCollator(align_to=4), dataset([1, 2, 3, 4, 5], [6, 7, 8]))
    assert batch["cu_seq_lens_real"].tolist() == [0, 5, 8]
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12]
    assert batch["input_ids"][0, :5].tolist() == [1, 2, 3, 4, 5]
    assert batch["input_ids"][0, 8:11].tolist() == [6, 7, 8]
    supervised = torch.nonzero(batch["labels"][0] != -100)[:, 0].tolist()
    assert supervised == [1, 2, 3, 4, 9, 10]
    assert batch["num_tokens"] == 8


def test_functionary_265_packed_loss_is_the_sum_of_the_documents() -> None:
    documents = [([1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7, 8], [4, 5, 6, 7, 8])]
    batch = collate(PackedCollator(), dataset(*[ids for ids, _ in documents]))
    for name, value in packed_by_hand(documents).items():
        assert torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
    assert batch["num_target_tokens"] == 2 + 4
    apart = sum(losses.sum().item() for losses in sequence_losses(tiny_llama(attention="eager"), documents))
    assert causal_lm_loss_sum(tiny_llama(), batch).item() == pytest.approx(apart, abs=1e-4)
    bounds = batch["cu_seq_lens_q"].tolist()
    assert [stop - start for start, stop in pairwise(bounds)] == [3, 5]
