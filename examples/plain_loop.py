"""A training loop of your own: pack, train, and read what the loader did.

    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py    # the same code; each rank gets its share

`packed_dataloader` builds data set, samplers, collator and loader. Every row is in one batch of an epoch,
every rank has the same number of batches, and `len(loader)` is exact before the first one. `optimizer_steps`
knows how many target tokens a step has over all its micro-batches and ranks, by which its loss is divided.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from multipack import optimizer_steps, packed_dataloader

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")

random = np.random.default_rng(0)
lengths = random.lognormal(4, 0.8, 2000).astype(int).clip(1, 512)
rows = [random.integers(0, 256, n) for n in lengths]  # or a datasets.Dataset with a column input_ids

loader = packed_dataloader(rows, capacity=1024, accumulate=2, seed=0)
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(2):  # the order is another one each epoch, without set_epoch
    for step in optimizer_steps(loader):
        for batch in step:
            logits = model(batch["input_ids"])[0, :-1]
            # -100 at the first token of each sequence: nothing before it is its own.
            targets = batch["labels"][0, 1:]
            loss = cross_entropy(logits, targets, reduction="sum") / step.loss_divisor
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {len(loader)} batches, loss {loss.item():.3f}")
print(loader.stats)
if dist.is_initialized():
    dist.destroy_process_group()
