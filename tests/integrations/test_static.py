"""Static batches through models: the same loss, and one compiled graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_llama import random_sequences, sequence_losses, tiny_llama
from torch._dynamo.testing import CompileCounter

from multipack import DistributedBatchSampler, MultipackBatchSampler, PackedCollator, TokenDataset, block_mask
from multipack.integrations.attention import model_inputs

CAPACITY, BINS, LIMIT = 128, 2, 16
STATIC = {
    "capacity": CAPACITY,
    "pad_to": "capacity",
    "static": True,
    "bins_per_batch": BINS,
    "max_sequences_per_bin": LIMIT,
}

# Compiling imports modules of torch that call its own deprecated functions.
compiles = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def loss_of(model, batch, **inputs):
    """Sum over targets, as a training step has it."""
    logits = model(**inputs).logits
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("attention", ["multipack", "sdpa"])
def test_empty_segments_change_no_loss(attention, layout):
    # 2 of 3 bins, 7 of 15 sequences and much padding; each sequence alone has the right loss.
    sequences = random_sequences([30, 1, 12, 64, 3, 9, 2])
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in sequences]
    options = STATIC | {"capacity": 80, "bins_per_batch": 3, "max_sequences_per_bin": 5}
    if layout == "rows":
        options |= {"layout": "rows", "pad_to": None}
    selection = TokenDataset(rows).__getitems__(range(7))
    selection.bin_offsets = (0, 3, 7)
    batch = PackedCollator(**options)(selection)
    assert (batch["cu_seq_lens_q"].diff() == 0).any()
    model = tiny_llama(attention=attention)
    inputs = model_inputs(batch)
    if attention == "sdpa":
        inputs = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
    loss = loss_of(model, batch, **inputs)
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    alone = tiny_llama(attention="eager")
    expected = torch.cat(list(sequence_losses(alone, sequences))).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for gradient, parameter in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
