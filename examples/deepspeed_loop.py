"""DeepSpeed with a loop of your own: the engine takes batches, the loader deals them.

    torchrun --nproc-per-node 2 examples/deepspeed_loop.py

Do not pass `training_data` to `deepspeed.initialize`: it wants a data set and deals rows by itself. The
loader's place goes into `client_state` of the checkpoint.
"""

from __future__ import annotations

import tempfile

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from multipack import optimizer_steps, packed_dataloader

deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
random = np.random.default_rng(0)
rows = [random.integers(0, 64, n) for n in random.integers(4, 60, 80)]
loader = packed_dataloader(rows, capacity=128)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    config={
        "train_micro_batch_size_per_gpu": 1,  # what DeepSpeed calls one batch, however many sequences it holds
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
folder = tempfile.mkdtemp() if dist.get_rank() == 0 else None
folders = [folder]
dist.broadcast_object_list(folders)  # all ranks write into the folder of rank 0
for epoch in range(2):
    for number, step in enumerate(optimizer_steps(loader), start=1):
        (batch,) = step
        logits = engine(batch["input_ids"].to(engine.device))[0, :-1]
        targets = batch["labels"].to(engine.device)[0, 1:]
        loss = cross_entropy(logits, targets, reduction="sum") / step.loss_divisor
        engine.backward(loss)
        engine.step()
        if (epoch, number) == (1, 5):
            engine.save_checkpoint(folders[0], client_state={"loader": loader.state_dict()})
    print(f"rank {dist.get_rank()}, epoch {epoch}: {number} batches, loss {loss.item():.3f}")

_, state = engine.load_checkpoint(folders[0])
loader.load_state_dict(state["loader"])
print(f"rank {dist.get_rank()}, resumed: {sum(1 for _ in loader)} batches left of {number}")
dist.destroy_process_group()
