"""Every target token of an optimizer step weighs the same, on whichever of two ranks it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from train.ranks import run_ranks

from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.sizes import PPOSizes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(2, Path(__file__).with_name("token_weights_worker.py"), folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def sizes(
    ranks: int, rollout: int, train: int, mode: Literal["epochs", "steps"] = "epochs", updates: int = 1
) -> PPOSizes:
    return PPOSizes(
        num_replicas=ranks,
        rollout_batch_size=rollout,
        num_collect_steps=1,
        train_batch_size=train,
        update_mode=mode,
        num_update_steps=updates,
    )


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.report("huggingface/transformers#34242")
def test_micro_batches_weigh_by_their_tokens(two_ranks: list[dict[str, Any]], stage: int) -> None:
    # 2 tokens of loss 1.0 in one micro-batch, 8 of 2.0 in the other: 18 / 10; a mean of means says 1.5. The
    # micro-batches are those of two ranks, of two micro-steps, or both; what is reported is what is
    # minimised.
    for rank in two_ranks:
        answers = rank[f"2 of 1.0 and 8 of 2.0, stage {stage}"]
        assert np.array(answers) == pytest.approx(np.full((3, 2), 1.8))


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.report("PrimeIntellect-ai/prime-rl#1960")
def test_a_lonely_token_weighs_as_any_other(two_ranks: list[dict[str, Any]], stage: int) -> None:
    # 5 tokens of loss 1.0 and 1 of 7.0: 12 / 6; a mean of means says 4.0.
    for rank in two_ranks:
        assert rank[f"5 of 1.0 and 1 of 7.0, stage {stage}"] == pytest.approx([2.0, 2.0])


@pytest.mark.distributed
@pytest.mark.report("NVIDIA/Megatron-LM#7207")
def test_evaluation_sums_before_it_divides(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["three batches"] == [pytest.approx(29 / 13), 13]
        assert rank["nothing"] == [0.0, 0, ["WARNING"]]


@pytest.mark.distributed
@pytest.mark.report("bghira/SimpleTuner#3095")
def test_ranks_of_different_batch_sizes_are_gathered(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["1 of 4.0 and 3 of 2.0"] == [pytest.approx(2.5), 4]


@pytest.mark.distributed
@pytest.mark.report("mlcommons/training#625")
@pytest.mark.report("axolotl-ai-cloud/axolotl#1966")
def test_two_ranks_find_differing_seeds_and_need_none_to_know_their_length(
    two_ranks: list[dict[str, Any]],
) -> None:
    # 5 rows of 3 tokens fit a bin of 16: 40 bins, 20 a rank, asked for by rank 0 while rank 1 was silent.
    assert two_ranks[0]["alone"] == two_ranks[1]["alone"]
    assert two_ranks[0]["alone"][:4] == [20, 20, 20, 16]
    assert all("plan other data than rank 0" in rank["seeds differ"] for rank in two_ranks)


@pytest.mark.distributed
@pytest.mark.report("unslothai/unsloth-zoo#832")
def test_ranks_generate_from_different_prompts(two_ranks: list[dict[str, Any]]) -> None:
    run = sizes(2, rollout=8, train=2)
    (first,), (second,) = (list(deal_prompts(run, 8, num_episodes=1, seed=0, rank=rank)) for rank in range(2))
    assert (len(first), len(second)) == (4, 4)
    assert sorted(first + second) == list(range(8))
    # So do two processes, and what they gather is of eight different prompts.
    for rank in two_ranks:
        assert rank["prompts"] == first + second
