"""Attention over slices: loss and gradients are those of whole batches, on real ranks; and what it
refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_llama import tiny_llama
from train.ranks import run_ranks

from multipack import PackedCollator, context_slice
from multipack.integrations.context_attention import CONTEXT_ATTENTION, context_inputs

WORKER = Path(__file__).with_name("context_worker.py")


@pytest.mark.distributed
@pytest.mark.slow
def test_slices_train_as_whole_batches_do(tmp_path):
    # 4 ranks: twice 2 slices, then 4; batches of 3 to 40 sequences, with and without static shapes.
    run_ranks(4, WORKER, tmp_path)
    for rank in range(4):
        answer = json.loads((tmp_path / f"{rank}.json").read_text())
        assert answer.keys() == {f"{kind} cp {size}" for kind in ("llama", "mistral") for size in (2, 4)}
        for pairs in answer.values():
            assert len(pairs) == 8
            for largest_gradient, difference in pairs:
                assert difference < 1e-5
                assert largest_gradient > 1e-2  # which a wrong key would show in


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_slices_of_another_group_are_refused(group):
    batch = PackedCollator()([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7, 8]}])
    with pytest.raises(ValueError, match="no contiguous slice 0 of a flat batch of 8 slots"):
        context_inputs(context_slice(batch, 0, 2, layout="contiguous"), group)
    rows = PackedCollator(layout="rows", capacity=8)([{"input_ids": [1, 2, 3, 4]}])
    assert context_inputs(context_slice(rows, 0, 1), group)["input_ids"].shape == (1, 8)
    with pytest.raises(ValueError, match=r"no global_cu_seq_lens.*cut it by context_slice"):
        context_inputs(batch, group)


def test_what_contradicts_the_slices_is_refused(group):
    batch = PackedCollator()([{"input_ids": [1, 2, 3, 4]}])
    inputs = context_inputs(context_slice(batch, 0, 1, layout="contiguous"), group)
    model = tiny_llama(attention=CONTEXT_ATTENTION)
    assert model(**inputs).logits.shape == (1, 4, 64)
    with pytest.raises(ValueError, match="got no context_segments"):
        model(input_ids=batch["input_ids"], use_cache=False)
    with pytest.raises(ValueError, match="neither a mask nor a key-value cache"):
        model(**inputs, attention_mask=torch.ones(1, 4, dtype=torch.long))
