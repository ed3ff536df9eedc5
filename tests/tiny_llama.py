"""A Llama small enough for a test, packed batches written out by hand, and training as plainly as it can be
put."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
Sequence = tuple[list[int], list[int]]
"""Token ids, and labels with -100 where nothing is to be learnt."""


def tiny_llama(seed: int = 0, attention: str = "multipack", **overrides: Any) -> LlamaForCausalLM:
    """Two layers, grouped-query heads, float32, always the same weights for one seed."""
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM._from_config(LlamaConfig(**config | overrides), attn_implementation=attention)


def random_sequences(lengths: list[int], seed: int = 0) -> list[Sequence]:
    """Random tokens, of which about two thirds are targets."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < 0.33
        sequences.append((ids.tolist(), ids.masked_fill(ignored, -100).tolist()))
    return sequences


def packed(sequences: list[Sequence]) -> dict[str, Any]:
    """What PackedCollator makes of them: one flat row, first labels masked."""
    lengths = [len(ids) for ids, _ in sequences]
    cu_seq_lens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    labels = torch.tensor([[label for _, row in sequences for label in (-100, *row[1:])]])
    return {
        "input_ids": torch.tensor([[token for ids, _ in sequences for token in ids]]),
        "labels": labels,
        "position_ids": torch.tensor([[position for length in lengths for position in range(length)]]),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "num_target_tokens": int((labels != -100).sum()),
        "num_tokens": sum(lengths),
        "num_sequences": len(lengths),
    }


def sequence_losses(model: LlamaForCausalLM, sequences: list[Sequence]) -> Iterator[Tensor]:
    """Each sequence on its own through a stock model: the losses of its target tokens."""
    for ids, labels in sequences:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        if len(ids) > 1:
            losses = F.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="none")
            yield losses[torch.tensor(labels[1:]) != -100]


def train_plainly(
    steps: list[list[Sequence]], max_grad_norm: float, **adamw: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """One process, no packing, no ranks: the loss and gradient norm of each step, and the parameters at the
    end."""
    model = tiny_llama(attention="eager")
    norms_of = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": norms_of, "weight_decay": 0.0}], **adamw)
    losses, norms = [], []
    for sequences in steps:
        loss = torch.cat(list(sequence_losses(model, sequences))).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
