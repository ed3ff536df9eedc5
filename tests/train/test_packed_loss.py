"""Losses of packed batches are those of their sequences alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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


@pytest.mark.report("huggingface/transformers#47496")
def test_positions_may_start_at_two() -> None:
    batch = collate(PackedCollator(position_start=2), dataset([1, 2, 3], [4, 5]))
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert batch["num_sequences"] == 2
    # Attention knows the sequences by their boundaries: no position is 0, and each sequence has the losses it
    # has alone.
    model = tiny_llama(attention="eager")
    alone = sum(losses.sum().item() for losses in sequence_losses(model, [([1, 2, 3],) * 2, ([4, 5],) * 2]))
    assert causal_lm_loss_sum(tiny_llama(), batch).item() == pytest.approx(alone, abs=1e-4)


@pytest.mark.report("linkedin/Liger-Kernel#329")
def test_a_token_weighs_the_same_packed_or_not() -> None:
    """The loss is a mean over target tokens in every layout. A mean over sequences, which the report wants as
    an option, is not
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
