"""accelerate: `prepare` takes the loader as it is; accumulation, saving and resuming work as ever.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

The loader tells accelerate when it yields the last batch, so the last window of an epoch is stepped although it is not full.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from multipack import packed_dataloader
from multipack.integrations.attention import ATTENTION, model_inputs
from multipack.integrations.verify import verify_packing

random = np.random.default_rng(0)
rows = [random.integers(0, 64, n) for n in random.integers(4, 60, 80)]

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
model = LlamaForCausalLM._from_config(
    config, attn_implementation=ATTENTION
)  # "flash_attention_2" works as well
loader = packed_dataloader(rows, capacity=128, accumulate=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
verify_packing(model, max_length=128)

folder = tempfile.mkdtemp()
for epoch in range(2):
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            targets = max(1, batch["num_target_tokens"])
            loss = model(**model_inputs(batch), labels=batch["labels"], num_items_in_batch=targets).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if (epoch, step) == (1, 4):
            accelerator.save_state(folder)  # the place in the epoch is saved with the rest
    accelerator.print(f"epoch {epoch}: {step + 1} batches a rank, loss {loss.item():.3f}")

accelerator.load_state(folder)
accelerator.print(
    f"resumed: {sum(1 for _ in loader)} batches left of {step + 1}, for 5 were seen before the save"
)
accelerator.end_training()
