"""The rows all frameworks train on, and the plain loop they are compared with."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.integrations.attention import model_inputs, stock_attention
from multipack.loading.packed import packed_dataloader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler

CAPACITY = 64
OPTIONS: dict[str, Any] = {"seed": 15, "method": "next_fit"}
"""Next-fit wastes most, and so gives epochs of different lengths: what frameworks that count batches once get
wrong."""
Seen = list[tuple[str, list[int]]]
"""A digest of everything in each batch, and the rows in it."""


def rows(num_rows: int = 60) -> list[dict[str, Any]]:
    """Random tokens, with the number of the row."""
    random = np.random.default_rng(5)
    lengths = random.integers(1, 48, size=num_rows)
    return [{"input_ids": random.integers(0, 64, size=n).tolist(), "row": i} for i, n in enumerate(lengths)]


def our_loader(**options: Any) -> Any:
    """The loader of this rank."""
    return packed_dataloader(rows(), CAPACITY, **OPTIONS | options)


def look(batch: dict[str, Any]) -> tuple[str, list[int]]:
    """What there is to know of a batch."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name]
        content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        digest.update(name.encode() + str(getattr(value, "shape", "")).encode() + content)
    return digest.hexdigest()[:16], batch["row"].tolist()


def plain_loop(num_epochs: int) -> list[Seen]:
    """This rank's batches of each epoch by torch's loader."""
    dataset = TokenDataset(rows())
    sampler = DistributedBatchSampler(MultipackBatchSampler(dataset.lengths, CAPACITY, **OPTIONS))
    loader: Any = TorchDataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator())
    epochs = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        epochs.append([look(batch) for batch in loader])
    return epochs


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Mean over the targets of a batch; 0 where there is none, as in the repeats at the end of an epoch."""
    targets = max(1, batch["num_target_tokens"])
    loss: torch.Tensor = model(**model_inputs(batch), labels=batch["labels"], num_items_in_batch=targets).loss
    return loss


def summed_loss(model: Any, tokens: list[int]) -> float:
    """The next-token losses of one sequence on its own."""
    if len(tokens) == 1:
        return 0.0
    ids = torch.tensor([tokens])
    with stock_attention(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))


def largest_difference(one: Any, other: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same from logits, as a pipeline wants it."""
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    return losses / max(1, int((labels != -100).sum()))
