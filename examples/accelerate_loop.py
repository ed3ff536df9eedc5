"""accelerate: `prepare` takes the loader as it is; saving and resuming work as ever.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

`optimizer_steps` takes the place of `accelerator.accumulate`: it knows how many target tokens a step has over
all its micro-batches and ranks, and steps the last micro-batches of an epoch although they are fewer.
"""

from __future__ import annotations

import contextlib
import tempfile

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from multipack import optimizer_steps, packed_dataloader
from multipack.integrations.attention import ATTENTION, model_inputs
from multipack.integrations.verify import verify_packing

random = np.random.default_rng(0)
rows = [random.integers(0, 64, n) for n in random.integers(4, 60, 80)]

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
# "flash_attention_2" works as well.
model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION)
loader = packed_dataloader(rows, capacity=128, accumulate=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
verify_packing(model, max_length=128)

folder = tempfile.mkdtemp()
for epoch in range(2):
    for number, step in enumerate(optimizer_steps(loader)):
        for i, batch in enumerate(step):
            is_last = i + 1 == len(step)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                inputs = model_inputs(batch) | {"labels": batch["labels"]}
                loss = model(**inputs, num_items_in_batch=step.loss_divisor).loss
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (epoch, number) == (1, 0):
            accelerator.save_state(folder)  # the place in the epoch is saved with the rest
    accelerator.print(f"epoch {epoch}: {number + 1} steps, loss {loss.item():.3f}")

accelerator.load_state(folder)
left = sum(1 for _ in loader)
accelerator.print(f"resumed: {left} batches left of {len(loader)}, for 4 were seen before the save")
accelerator.end_training()
