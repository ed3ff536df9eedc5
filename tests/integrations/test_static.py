"""Static batches through models: the same loss, and one compiled graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_llama import random_sequences, sequence_losses, tiny_llama
from torch._dynamo.testing import CompileCounter

from multipack import DistributedBatchSampler, MultipackBatchSampler, PackedCollator, TokenDataset, block_mask
from multipack.integrations.attention import model_inputs
from multipack.order.batch import BatchIndices

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


@compiles
def test_one_graph_for_all_batches_of_three_epochs():
    # 101 rows in batches of 2 bins: the last batch of an epoch has one bin, or few sequences, or repeats.
    sequences = random_sequences(torch.randint(1, 60, (101,), generator=torch.manual_seed(0)).tolist())
    dataset = TokenDataset([{"input_ids": ids, "labels": labels} for ids, labels in sequences])
    bins = MultipackBatchSampler(dataset.lengths, CAPACITY, bins_per_batch=BINS, max_sequences_per_bin=LIMIT)
    sampler = DistributedBatchSampler(bins, num_replicas=3, rank=2, tail="pad")
    model = tiny_llama(attention="sdpa")
    counter = CompileCounter()

    def step(batch):
        inputs = {
            name: batch[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q", "max_length_q")
        }
        return loss_of(model, batch, **inputs, use_cache=False)

    compiled = torch.compile(step, dynamic=False, backend=counter)
    collators = PackedCollator(**STATIC), PackedCollator(pad_to="capacity")
    shapes_before = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for ids in sampler.read():
            selection = dataset.__getitems__(ids)
            static, dynamic = (collator(selection) for collator in collators)
            shapes_before.add(
                (dynamic["input_ids"].shape, dynamic["cu_seq_lens_q"].shape, dynamic["max_length_q"])
            )
            loss = compiled(static)
            loss.backward()
            torch.testing.assert_close(loss, step(dynamic))
    assert counter.frame_count == 1
    assert len(shapes_before) > 5  # each of which would be a graph


@compiles
def test_one_graph_of_flex_attention():
    sequences = random_sequences([30, 1, 12, 64, 3, 9, 2, 40, 40])
    dataset = TokenDataset([{"input_ids": ids, "labels": labels} for ids, labels in sequences])
    collator = PackedCollator(block_mask=64, **STATIC)
    model = tiny_llama(attention="flex_attention").requires_grad_(False)  # on CPU it has no backward
    counter = CompileCounter()
    compiled = torch.compile(
        lambda batch, **inputs: loss_of(model, batch, **inputs), dynamic=False, backend=counter
    )
    for rows in ([0, 1, 2], [3, 4, 5, 6], [7, 8]):
        batch = collator(dataset.__getitems__(BatchIndices(rows, bin_capacity=CAPACITY)))
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        found = compiled(batch, attention_mask=block_mask(batch, 64), **inputs)
        alone = tiny_llama(attention="eager")
        expected = torch.cat(list(sequence_losses(alone, [sequences[row] for row in rows]))).sum()
        torch.testing.assert_close(found, expected.detach())
    assert counter.frame_count == 1
