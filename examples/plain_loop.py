"""A training loop of your own: pack, train, and read what the loader did.

    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py    # the same code; each rank gets its share

`packed_dataloader` builds data set, samplers, collator and loader. Every row is in one batch of an epoch, every rank has the same
number of batches, and `len(loader)` is exact before the first one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from multipack import packed_dataloader

random = np.random.default_rng(0)
lengths = random.lognormal(4, 0.8, 2000).astype(int).clip(1, 512)
rows = [random.integers(0, 256, n) for n in lengths]  # or a datasets.Dataset with a column input_ids

loader = packed_dataloader(rows, capacity=1024, seed=0)
model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(2):  # the order is another one each epoch, without set_epoch
    for batch in loader:
        logits = model(batch["input_ids"])[0, :-1]
        targets = batch["labels"][
            0, 1:
        ]  # -100 at the first token of each sequence: nothing before it is its own
        loss = cross_entropy(logits, targets, reduction="sum") / max(1, batch["num_target_tokens"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {len(loader)} batches, loss {loss.item():.3f}")
print(loader.stats)
