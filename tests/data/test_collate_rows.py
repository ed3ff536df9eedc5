"""Rows as tokenizers return them, in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset


def collate(collator: Any, source: TokenDataset) -> dict[str, Any]:
    """All rows in one batch, as a selection; plain dicts must give the same."""
    batch: dict[str, Any] = collator(source.__getitems__(range(len(source))))
    slower = collator([source[i] for i in range(len(source))])
    assert batch.keys() == slower.keys()
    for name, value in batch.items():
        same = torch.equal(value, slower[name]) if isinstance(value, torch.Tensor) else value == slower[name]
        assert same, name
    return batch


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray, np.ndarray.tolist])
@pytest.mark.report("huggingface/transformers#33946")
def test_tokenizer_output_with_a_leading_one(make: Any) -> None:
    rows = [{"input_ids": make(np.arange(length)[None])} for length in (4, 2)]
    batch = collate(PackedCollator(), TokenDataset(rows))
    for each in (batch, PackedCollator()(rows)):
        assert each["cu_seq_lens_q"].tolist() == [0, 4, 6]
        assert each["input_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
