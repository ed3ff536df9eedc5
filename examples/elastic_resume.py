"""Stop on two ranks, go on with three: no row is lost, none comes twice.

    python examples/elastic_resume.py

Here one process plays all ranks by naming them; in a real run `rank` and `num_replicas` are left out. A state
is a few numbers, the same on every rank, so one rank may save it for all.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from multipack import DataLoader, packed_dataloader

random = np.random.default_rng(0)
rows = {
    "input_ids": [random.integers(0, 64, n) for n in random.integers(4, 60, 200)],
    "row": np.arange(200),  # a column of numbers comes along as one number a sequence
}


def loaders(num_replicas: int) -> list[DataLoader[dict[str, Any]]]:
    return [
        packed_dataloader(rows, capacity=128, rank=rank, num_replicas=num_replicas)
        for rank in range(num_replicas)
    ]


seen: Counter[int] = Counter()
before = loaders(2)
for loader in before:
    batches = iter(loader)
    for _ in range(9):  # each rank takes nine batches, then the machine goes away
        seen.update(next(batches)["row"].tolist())
state = json.dumps(before[0].state_dict())
print(f"2 ranks saw {seen.total()} rows of {len(rows['row'])}; saved {len(state)} bytes")

for loader in loaders(3):
    loader.load_state_dict(json.loads(state))
    for batch in loader:
        if batch["num_target_tokens"]:  # a rank without a row of its own repeats one that counts for nothing
            seen.update(batch["row"].tolist())
assert seen == Counter(range(200))
print("3 ranks saw the others, each row once")
