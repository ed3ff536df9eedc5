"""One rank of test_mesh.py: four gloo ranks as two replicas of two tensor-parallel ranks; writes what it saw
as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig

from multipack import StreamPacker, TokenDataset, optimizer_steps, packed_dataloader
from multipack.train.process import leave_process_group

NUM_ROWS = 203


def rows_of(loader):
    """The rows of each batch, and what the batches hold."""
    batches = list(loader)
    rows = [[] if batch["num_tokens"] == 0 else batch["indices"].tolist() for batch in batches]
    return rows, [batch["input_ids"].flatten().tolist() for batch in batches]


def refusal(make):
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rows = TokenDataset([rng.integers(0, 1000, size).tolist() for size in rng.integers(1, 60, NUM_ROWS)])
    options = {"capacity": 64, "return_indices": True}
    accelerator = Accelerator(cpu=True)
    # accelerate takes a ParallelismConfig on GPUs only; there it lies where this puts it, and makes this
    # mesh.
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    AcceleratorState._shared_state["parallelism_config"] = config
    answer = {"accelerate": refusal(lambda: packed_dataloader(rows, **options))}
    mesh = config.build_device_mesh("cpu")
    loader = accelerator.prepare(packed_dataloader(rows, mesh=mesh["dp_shard"], **options))
    answer["prepared"] = rows_of(loader)
    AcceleratorState._shared_state["parallelism_config"] = None
    answer["mesh"] = refusal(lambda: packed_dataloader(rows, **options))
    answer["stream_undeclared"] = refusal(lambda: StreamPacker([], 64))

    loader = packed_dataloader(rows, mesh=mesh["dp_shard"], accumulate=3, loss_weights="tokens", **options)
    answer["steps"] = [
        [
            step.num_target_tokens,
            step.sum_loss_weights,
            step.num_replicas,
            sum(batch["num_target_tokens"] for batch in step),
        ]
        for step in optimizer_steps(loader)
    ]

    loader = packed_dataloader(rows, group=mesh["dp_shard"].get_group(), **options)
    answer["len"] = len(loader)
    batches = iter(loader)
    answer["before"] = [next(batches)["indices"].tolist() for _ in range(4)]
    state = loader.state_dict()
    answer["state"] = state
    for name, (rank, num_replicas) in {"1": (0, 1), "4": (dist.get_rank(), 4)}.items():
        other = packed_dataloader(rows, rank=rank, num_replicas=num_replicas, **options)
        other.load_state_dict(state)
        answer[f"after_on_{name}"] = rows_of(other)[0]

    source = [{"input_ids": [number] * 5} for number in range(21)]
    stream = StreamPacker(source, 16, mesh=mesh["dp_shard"])
    answer["stream"] = [
        [] if selection.repeated else [int(row["input_ids"][0]) for row in selection] for selection in stream
    ]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
