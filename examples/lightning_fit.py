"""Lightning: a data module of packed batches, on any number of devices and with Lightning's default flags.

    python examples/lightning_fit.py

Lightning's checkpoints hold the place in the epoch: `trainer.fit(..., ckpt_path=...)` goes on with the next
batch.
"""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from multipack.integrations.lightning import PackedDataModule

random = np.random.default_rng(0)
rows = [random.integers(0, 64, n) for n in random.integers(4, 60, 80)]


class NextToken(lightning.LightningModule):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))

    def loss_sum(self, batch: dict[str, Any]) -> torch.Tensor:
        logits, targets = self.net(batch["input_ids"])[0, :-1], batch["labels"][0, 1:]
        return cross_entropy(logits, targets, reduction="sum")

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        # Lightning averages gradients over ranks, so their mean number of targets makes it the mean over all
        # of them.
        targets = torch.tensor(float(batch["num_target_tokens"]))
        return self.loss_sum(batch) / self.trainer.strategy.reduce(targets, reduce_op="mean").clamp(min=1)

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        # Weighed by targets the mean is one over tokens, whatever the batches hold.
        targets = batch["num_target_tokens"]
        self.log("val_loss", self.loss_sum(batch) / max(1, targets), batch_size=targets, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(NextToken(), datamodule=PackedDataModule(rows[:60], capacity=128, val=rows[60:]))
print(f"{trainer.global_step} steps, validation {trainer.callback_metrics['val_loss']:.3f}")
