"""Four real ranks that compute two model replicas: who gets which batches, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train.ranks import run_ranks

WORKER = Path(__file__).with_name("mesh_worker.py")
NUM_ROWS = 203


def flat(batches):
    return [row for batch in batches for row in batch]


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_of_one_replica_get_the_same_batches(tmp_path):
    # dp 2 x tp 2: ranks 0 and 1 are one replica, 2 and 3 the other.
    run_ranks(4, WORKER, tmp_path)
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for key in ("prepared", "before", "stream"):
        assert answers[0][key] == answers[1][key]
        assert answers[2][key] == answers[3][key]
        assert answers[0][key] != answers[2][key]
    assert sorted(flat(answers[0]["prepared"][0]) + flat(answers[2]["prepared"][0])) == list(range(NUM_ROWS))
    assert sorted(flat(answers[0]["stream"]) + flat(answers[2]["stream"])) == list(range(21))
    # Targets of a step are those of both replicas, each counted once however many ranks compute it.
    for step, other in zip(answers[0]["steps"], answers[2]["steps"], strict=True):
        targets = step[3] + other[3]
        assert step[:3] == other[:3] == [targets, targets, 2]
    assert len({answer["len"] for answer in answers}) == 1
    assert len({json.dumps(answer["state"]) for answer in answers}) == 1
    before = flat(answers[0]["before"]) + flat(answers[2]["before"])
    assert sorted(before + flat(answers[0]["after_on_1"])) == list(range(NUM_ROWS))
    on_four = [row for answer in answers for row in flat(answer["after_on_4"])]
    assert sorted(before + on_four) == list(range(NUM_ROWS))
    for answer in answers:
        assert "accelerate's parallelism_config has tp = 2" in answer["accelerate"]
        assert "mesh=accelerator.torch_device_mesh" in answer["accelerate"]
        assert "tp = 2: 2 ranks compute each model replica" in answer["mesh"]
        assert "tp = 2" in answer["stream_undeclared"]
