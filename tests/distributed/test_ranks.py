"""Real processes under torchrun with gloo: what one process can only simulate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


def torchrun(num_ranks: int, folder: Path) -> list[dict]:
    """Run the worker on so many ranks; returns what each wrote."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_agree_without_talking(num_ranks, tmp_path):
    answers = torchrun(num_ranks, tmp_path)
    for epoch in range(2):
        seen = [row for answer in answers for batch in answer["epochs"][epoch] for row in batch]
        assert sorted(seen) == list(range(answers[0]["num_rows"]))
    assert len({len(answer["epochs"][0]) for answer in answers}) == 1
    assert len({answer["len"] for answer in answers}) == 1
    assert answers[0]["len_asked_by_rank_0_alone"] == answers[0]["len"]
    assert len({json.dumps(answer["state"]) for answer in answers}) == 1
    assert [answer["ranks"] for answer in answers] == [[rank, num_ranks] for rank in range(num_ranks)]
    # Rank 1 breaks off two batches later than the others: prefetched batches must not move its epoch.
    assert len({answer["epoch_after_break"] for answer in answers}) == 1
    assert all("plan other data than rank 0" in answer["disagreement"] for answer in answers)
    assert all("built for rank" in answer["late_group"] for answer in answers)
    assert_streams_end_together([answer["streams"] for answer in answers], answers[0]["num_rows"])
    assert all(
        f"{num_ranks - 1} of {num_ranks} ranks got no row" in answer["empty_stream"] for answer in answers
    )


def assert_streams_end_together(streams: list[dict], num_rows: int) -> None:
    for tail in ("pad", "drop"):
        assert len({len(stream[tail]) for stream in streams}) == 1
    num_ranks = len(streams)
    expected = [*range(0, num_rows, num_ranks), *(i for i in range(100) if i % num_ranks)]
    seen = [row for stream in streams for batch in stream["pad"] for row in batch if row >= 0]
    assert sorted(seen) == sorted(expected)
    assert any(row < 0 for row in streams[1]["pad"][-1])
    assert all(row >= 0 for stream in streams for batch in stream["drop"] for row in batch)
    assert len(streams[0]["drop"]) < len(streams[0]["pad"])
