"""Keep your script, change the import line: the same batches, made beside the training step.

    python examples/drop_in_swap.py

`multipack.DataLoader` takes torch's whole signature. Its `num_workers` counts background threads, one by
default.
"""

from __future__ import annotations

import time

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from multipack import DataLoader  # was: from torch.utils.data import DataLoader

images = TensorDataset(torch.randn(512, 3, 8, 8), torch.arange(512) % 10)
arguments = {"batch_size": 16, "shuffle": True, "drop_last": True}

torch.manual_seed(0)
before = list(TorchDataLoader(images, **arguments))
torch.manual_seed(0)
loader = DataLoader(images, **arguments)
after = []
for batch in loader:
    time.sleep(0.002)  # stands for a step on the GPU
    after.append(batch)

assert all(
    torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True)
)
print(f"{len(after)} equal batches; {loader.stats}")
