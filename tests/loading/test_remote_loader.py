"""Training from a store: the loader announces what comes, each row comes once an epoch, each block is fetched
once."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from multipack import packed_dataloader
from multipack.data.remote import remote


@pytest.fixture(scope="module")
def bucket():
    pytest.importorskip("moto")
    from object_server import object_server

    with object_server() as (direct, connection, faults):
        direct.create_dir("of-loaders")
        rng = np.random.default_rng(0)
        for shard in range(3):
            rows = [rng.integers(0, 100, rng.integers(1, 60)).tolist() for _ in range(80)]
            table = pa.table({"input_ids": rows, "length": [len(row) for row in rows]})
            parquet.write_table(
                table, f"of-loaders/train/{shard}.parquet", filesystem=direct, row_group_size=20
            )
        yield connection, faults


def loaders(bucket, folder, count, **options):
    source = lambda: remote(
        "s3://of-loaders/train/", filesystem=bucket[0], lengths="length", cache_dir=folder
    )
    return [
        packed_dataloader(
            source(),
            128,
            columns=[],
            bins_per_batch=2,
            return_indices=True,
            rank=rank,
            num_replicas=count,
            **options,
        )
        for rank in range(count)
    ]


def test_two_epochs_and_a_resume_on_other_ranks(bucket, tmp_path):
    _, faults = bucket
    faults.every = 10
    faults.first_byte = 0.1
    first = loaders(bucket, tmp_path, 2)
    found = Counter()
    for loader in first:
        for batch in loader:
            found.update(batch["indices"].tolist())
    assert found == Counter(range(240))
    assert all(loader.dataset.elsewhere.traffic.blocks_fetched <= 12 for loader in first)
    found = Counter()
    passes = [iter(loader) for loader in first]
    for _ in range(3):
        for batches in passes:
            found.update(next(batches)["indices"].tolist())
    state = json.loads(json.dumps(first[0].state_dict()))
    for batches in passes:
        batches.close()
    for loader in loaders(bucket, tmp_path, 3):
        loader.load_state_dict(state)
        for batch in loader:
            if batch["num_tokens"]:
                found.update(batch["indices"].tolist())
    assert found == Counter(range(240))
    faults.every, faults.first_byte = 0, 0.0
