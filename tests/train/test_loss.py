"""Sums over target tokens: every token weighs the same, however tokens fall into batches, micro-steps and
ranks."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import packed, random_sequences, sequence_losses, tiny_llama

from multipack.train import loss as loss_module
from multipack.train.loss import causal_lm_loss_sum, cross_entropy_sum, predicting_positions


@pytest.mark.report("MeetKai/functionary#265")
def test_packed_loss_is_the_sum_over_single_sequences():
    sequences = random_sequences([9, 1, 20, 4])
    right = torch.cat(list(sequence_losses(tiny_llama(attention="eager"), sequences)))
    ours = causal_lm_loss_sum(tiny_llama(), packed(sequences))
    assert len(right) == packed(sequences)["num_target_tokens"]
    torch.testing.assert_close(ours, right.sum(), atol=1e-4, rtol=1e-6)


def test_padded_loss_is_the_same_sum():
    sequences = random_sequences([9, 1, 20, 4])
    ids, labels, mask = torch.zeros(4, 20).long(), torch.full((4, 20), -100), torch.zeros(4, 20).long()
    for row, (tokens, targets) in enumerate(sequences):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        labels[row, 1 : len(tokens)] = torch.tensor(targets[1:])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    padded = causal_lm_loss_sum(tiny_llama(attention="sdpa"), batch)
    torch.testing.assert_close(
        padded, causal_lm_loss_sum(tiny_llama(), packed(sequences)), atol=1e-4, rtol=1e-6
    )


def test_a_batch_without_targets_gives_zero_and_zero_gradients():
    model = tiny_llama()
    loss = causal_lm_loss_sum(model, packed([([1, 2, 3], [-100] * 3), ([4], [4])]))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_chunks_change_neither_the_sum_nor_the_gradient(monkeypatch):
    logits = torch.randn(50, 12, requires_grad=True)
    targets = torch.randint(12, (50,))
    whole = cross_entropy_sum(logits, targets)
    (gradient,) = torch.autograd.grad(whole, logits)
    monkeypatch.setattr(loss_module, "_ROWS_PER_CHUNK", 16)
    chunked = cross_entropy_sum(logits, targets)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(torch.autograd.grad(chunked, logits)[0], gradient)


def test_half_precision_logits_are_summed_in_float32():
    # 4096 equal losses of log(4): a bfloat16 sum stops growing near 512.
    total = cross_entropy_sum(torch.zeros(4096, 4, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.long))
    assert total.item() == pytest.approx(4096 * 1.3862943611)


def test_the_position_before_each_target_predicts_it():
    labels = torch.tensor([-100, 7, -100, -100, 9, 9])
    assert predicting_positions(labels, 3).tolist() == [0, 3, 4]
