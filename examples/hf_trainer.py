"""transformers' Trainer, packed: one class name and one argument are other than usual.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

`per_device_train_batch_size` counts bins of `capacity` tokens. For a Trainer class of your own put the mixin
first: `class MyTrainer(PackedTrainerMixin, TheirTrainer)`.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from multipack.integrations.attention import ATTENTION
from multipack.integrations.transformers import PackedTrainer

random = np.random.default_rng(0)
rows = Dataset.from_dict(
    {"input_ids": [random.integers(0, 64, n).tolist() for n in random.integers(4, 60, 80)]}
)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
trainer = PackedTrainer(
    model=LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION),
    args=TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    ),
    train_dataset=rows,
    eval_dataset=rows.select(range(20)),
    capacity=128,
    packing={"balance": "step"},
)
trainer.train()
print(f"{trainer.state.global_step} steps, evaluation {trainer.evaluate()['eval_loss']:.3f}")
