"""One rank of test_ranks.py: writes what it saw as JSON."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from multipack import (
    DataLoader,
    DistributedBatchSampler,
    MultipackBatchSampler,
    StreamPacker,
    TokenDataset,
    packed_dataloader,
)
from multipack.distributed import check_agreement
from multipack.train.process import leave_process_group

NUM_ROWS = 203


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1000, size).tolist() for size in rng.integers(1, 60, NUM_ROWS)]
    lengths = [len(row) for row in rows]
    answer = {"num_rows": NUM_ROWS}

    # Before the process group: torchrun's environment. A group that says otherwise is refused.
    early = DistributedBatchSampler(MultipackBatchSampler(lengths, 64))
    answer["ranks"] = [early.rank, early.num_replicas]
    rank = early.rank
    environment = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "7"
    wrong = DistributedBatchSampler(MultipackBatchSampler(lengths, 64))
    os.environ["RANK"], os.environ["WORLD_SIZE"] = environment
    dist.init_process_group("gloo")
    try:
        next(iter(wrong))
    except ValueError as error:
        answer["late_group"] = str(error)

    loader = packed_dataloader(TokenDataset({"input_ids": rows}), 64, accumulate=2)
    sampler = loader.batch_sampler
    if rank == 0:  # a collective here would hang
        answer["len_asked_by_rank_0_alone"] = len(loader)
        repr(loader), sampler.state_dict()
    answer["epochs"] = []
    for _ in range(2):
        sampler_batches = list(sampler.read())
        collated = [batch["input_ids"].shape[1] for batch in loader]
        assert collated == [sum(lengths[row] for row in batch) for batch in sampler_batches]
        answer["epochs"].append([[] if batch.repeated else batch for batch in sampler_batches])
    answer["len"] = len(loader)

    for batch in itertools.islice(loader, len(loader) - (3 if rank == 1 else 1)):
        del batch
    answer["epoch_after_break"] = sampler.epoch
    list(loader)
    answer["state"] = loader.state_dict()

    answer["streams"] = {tail: read_stream(rows, tail) for tail in ("pad", "drop")}
    try:  # rank 0 alone has rows
        list(StreamPacker([{"input_ids": rows[0]}], 64))
    except ValueError as error:
        answer["empty_stream"] = str(error)

    check_agreement(sampler.fingerprint)
    try:
        check_agreement(sampler.fingerprint if rank == 0 else "{}")
    except ValueError as error:
        answer["disagreement"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    leave_process_group()


def read_stream(rows: list[list[int]], tail: str) -> list[list[int]]:
    """Rows of each batch of a stream that is much longer on rank 0; repeats are negative."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    marked = [{"input_ids": row, "row": i} for i, row in enumerate(rows) if rank == 0 or i < 100]
    # Every n-th row of its own list; a barrier inside the trainer must not disturb the agreement.
    packer = StreamPacker(marked, 64, pool_size=16, tail=tail, timeout=60)
    batches = []
    for batch in DataLoader(packer, batch_size=None, collate_fn=lambda selection: selection):
        ids = [int(sequence["row"]) for sequence in batch]
        batches.append([-1 - i for i in ids] if batch.repeated else ids)
        dist.barrier()
    assert all(i % world_size == rank for ids in batches for i in ids if i >= 0)
    return batches


if __name__ == "__main__":
    main(Path(sys.argv[1]))
