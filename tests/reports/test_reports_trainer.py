"""Public bug reports on trainers: losses, windows, batch sizes, prompts. The name of a test is repository and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from train.ranks import run_ranks

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.train import loop
from multipack.train.config import TrainConfig, load_config
from multipack.train.engine_deepspeed import read_deepspeed_file
from multipack.train.metrics import StepMetrics
from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.sizes import PPOSizes, check_prompts, collect_sizes
from multipack.train.ppo.update_plan import num_optimizer_steps, plan_step, step_rows
from multipack.train.stop import StopOnSigterm
from multipack.train.windows import epoch_steps, steps_left, windows


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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(2, Path(__file__).with_name("ranks_worker.py"), folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_colossalai_5066_a_buffer_below_the_training_batch_is_no_success() -> None:
    """Our train_batch_size counts all ranks: the report's 32 a rank on 8 ranks are 256."""
    with pytest.raises(
        ValueError, match=r"collects 64 sequences .* is 256 over 8 ranks \(32 a rank\): 64 < 256"
    ):
        sizes(8, rollout=64, train=256)
    enough = sizes(8, rollout=256, train=256)
    assert (enough.prompts_per_rank, enough.steps_per_iteration) == (32, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_transformers_34242_micro_batches_weigh_by_their_tokens(
    two_ranks: list[dict[str, Any]], stage: int
) -> None:
    # 2 tokens of loss 1.0 in one micro-batch, 8 of 2.0 in the other: 18 / 10; a mean of means says 1.5. The micro-batches are
    # those of two ranks, of two micro-steps, or both; what is reported is what is minimised.
    for rank in two_ranks:
        answers = rank[f"2 of 1.0 and 8 of 2.0, stage {stage}"]
        assert np.array(answers) == pytest.approx(np.full((3, 2), 1.8))


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_prime_rl_1960_a_lonely_token_weighs_as_any_other(
    two_ranks: list[dict[str, Any]], stage: int
) -> None:
    # 5 tokens of loss 1.0 and 1 of 7.0: 12 / 6; a mean of means says 4.0.
    for rank in two_ranks:
        assert rank[f"5 of 1.0 and 1 of 7.0, stage {stage}"] == pytest.approx([2.0, 2.0])


@pytest.mark.distributed
def test_megatron_lm_7207_evaluation_sums_before_it_divides(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["three batches"] == [pytest.approx(29 / 13), 13]
        assert rank["nothing"] == [0.0, 0, ["WARNING"]]


@pytest.mark.distributed
def test_simpletuner_3095_ranks_of_different_batch_sizes_are_gathered(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["1 of 4.0 and 3 of 2.0"] == [pytest.approx(2.5), 4]


@pytest.mark.distributed
def test_two_ranks_find_differing_seeds_and_need_none_to_know_their_length(
    two_ranks: list[dict[str, Any]],
) -> None:
    # mlcommons/training#625 and axolotl-ai-cloud/axolotl#1966, whose other halves are among the samplers' reports.
    # 5 rows of 3 tokens fit a bin of 16: 40 bins, 20 a rank, asked for by rank 0 while rank 1 was silent.
    assert two_ranks[0]["alone"] == two_ranks[1]["alone"]
    assert two_ranks[0]["alone"][:4] == [20, 20, 20, 16]
    assert all("plan other data than rank 0" in rank["seeds differ"] for rank in two_ranks)


def training(num_batches: int, accumulate: int, num_epochs: int = 1) -> tuple[DataLoader[Any], TrainConfig]:
    """A loader of so many batches of two tokens each."""
    dataset = TokenDataset((np.ones(2 * num_batches, np.int32), np.arange(0, 2 * num_batches + 1, 2)))
    sampler = DistributedBatchSampler(MultipackBatchSampler(dataset.lengths, 2), num_replicas=1, rank=0)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator())
    return loader, TrainConfig(gradient_accumulation_steps=accumulate, num_epochs=num_epochs)


def steps_of(loader: DataLoader[Any], config: TrainConfig) -> int:
    """Optimizer steps that the schedule is made for."""
    sampler: Any = loader.batch_sampler
    return steps_left(sampler, epoch_steps(sampler, config), config)


class Divisors:
    """An engine that notes what each micro-step is divided by."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.steps: list[list[float]] = [[]]

    def micro_step(self, loss_sum: Any, *, divisor: float, last: bool) -> torch.Tensor:
        self.steps[-1].append(divisor)
        return torch.zeros(())

    def step(self) -> torch.Tensor:
        self.steps.append([])
        return torch.zeros(())


@pytest.mark.parametrize(("num_batches", "accumulate", "expected"), [(7, 4, [4, 3]), (260, 256, [256, 4])])
def test_automodel_2257_the_last_window_of_an_epoch_is_stepped(
    num_batches: int, accumulate: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step is divided by its own target tokens, one a batch here."""
    loader, config = training(num_batches, accumulate)
    assert steps_of(loader, config) == 2
    engine: Any = Divisors()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    monkeypatch.setattr(loop, "sum_over_ranks", lambda *counts: list(counts))
    monkeypatch.setattr(loop.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 1)
    reported: list[StepMetrics] = []
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    stepper = loop.Stepper(engine, schedule, first_step=0, report=reported.append, stop=StopOnSigterm())
    optimizer.step()  # so that the schedule has something to follow
    for window in windows(loader, config):
        stepper.take(window)
    stepper.flush()
    assert engine.steps[:-1] == [[expected[0]] * expected[0], [expected[1]] * expected[1]]
    assert [line.num_target_tokens for line in reported] == expected
    assert schedule.last_epoch == 2


def test_transformers_22082_windows_end_with_the_epoch() -> None:
    loader, config = training(10, accumulate=4, num_epochs=2)
    assert steps_of(loader, config) == 6
    found = list(windows(loader, config))
    assert [len(window.batches) for window in found] == [4, 4, 2, 4, 4, 2]
    assert [window.ends_epoch for window in found] == [False, False, True] * 2
    assert [window.epoch for window in found] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])


def test_deepspeed_6914_the_global_batch_is_never_written_twice(tmp_path: Path) -> None:
    """Only the micro-batch and the accumulation are settings; the global batch follows from them and the real number of ranks, and
    a file that sets it is refused before the model is loaded."""
    file = tmp_path / "zero.json"
    run = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "bf16": False}
    zero = {"zero_optimization": {"stage": 2}}
    file.write_text(
        json.dumps(zero | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1})
    )
    assert "train_batch_size" not in read_deepspeed_file(str(file), **run)
    file.write_text(json.dumps(zero | {"train_batch_size": 8}))
    with pytest.raises(ValueError, match="sets train_batch_size, which the run sets itself"):
        read_deepspeed_file(str(file), **run)
    file.write_text(json.dumps(zero | {"train_micro_batch_size_per_gpu": 4}))
    with pytest.raises(ValueError, match="says train_micro_batch_size_per_gpu: 4, the run says 2"):
        read_deepspeed_file(str(file), **run)


def test_openrlhf_397_batch_sizes_follow_from_each_other() -> None:
    """Micro-batches are bounded by tokens, not counted in sequences, so 100 sequences on 8 ranks are no error here: they are spread
    over equal numbers of micro-batches. For SFT there is no global size that could contradict the others."""
    lengths = np.full(128, 10)
    plan = plan_step(lengths, np.arange(128), micro_batch_tokens=20, num_replicas=8, hidden_size=64)
    assert [[len(rows) for rows in step] for step in plan.micro_batches] == [[2] * 8] * 8
    plan = plan_step(lengths, np.arange(100), micro_batch_tokens=20, num_replicas=8, hidden_size=64)
    assert len(plan) == 7  # 50 bins of two, on 8 ranks
    assert all(1 <= len(rows) <= 2 for step in plan.micro_batches for rows in step)
    assert sorted(row for step in plan.micro_batches for rows in step for row in rows) == list(range(100))
    with pytest.raises(ValueError, match="train_batch_size is not a key"):
        load_config(["--train_batch_size", "128"])


def test_xtuner_1393_as_many_steps_as_asked_for() -> None:
    """Steps are asked for in update_mode "steps", which samples a whole batch for each; sizes of 3 and 2 are then not needed."""
    assert num_optimizer_steps(44, 3, "steps", 16) == 16
    drawn = list(step_rows(44, 3, "steps", 16, seed=[0]))
    assert [len(rows) for rows in drawn] == [3] * 16
    assert sizes(1, rollout=44, train=3, mode="steps", updates=16).steps_per_iteration == 16
    assert num_optimizer_steps(44, 3, "epochs", 1) == 15  # a pass over 44 takes 14 steps of 3 and one of 2


@pytest.mark.parametrize(("num_prompts", "expected"), [(30, [16, 14]), (20, [16, 4]), (10, [10])])
def test_labs_molt_85_an_episode_takes_each_prompt_once_and_ends(
    num_prompts: int, expected: list[int]
) -> None:
    assert list(collect_sizes(num_prompts, 16, num_episodes=1)) == expected
    run = sizes(1, rollout=16, train=1)
    steps = list(deal_prompts(run, num_prompts, num_episodes=2, seed=0, rank=0))
    assert [len(rows) for rows in steps] == expected * 2
    episodes = steps[: len(expected)], steps[len(expected) :]
    for episode in episodes:
        assert sorted(row for rows in episode for row in rows) == list(range(num_prompts))
    assert episodes[0] != episodes[1]


@pytest.mark.distributed
def test_unsloth_zoo_832_ranks_generate_from_different_prompts(two_ranks: list[dict[str, Any]]) -> None:
    run = sizes(2, rollout=8, train=2)
    (first,), (second,) = (list(deal_prompts(run, 8, num_episodes=1, seed=0, rank=rank)) for rank in range(2))
    assert (len(first), len(second)) == (4, 4)
    assert sorted(first + second) == list(range(8))
    # So do two processes, and what they gather is of eight different prompts.
    for rank in two_ranks:
        assert rank["prompts"] == first + second


def test_absolute_zero_reasoner_14_filtered_prompts_below_the_batch() -> None:
    run = sizes(1, rollout=64, train=32)
    with pytest.raises(
        ValueError, match=r"64 prompts, 40 of them dropped as too long, leave 24; .* is 32: 24 < 32"
    ):
        check_prompts(run, num_prompts=24, num_dropped=40, num_episodes=1)
    check_prompts(sizes(1, rollout=64, train=24), num_prompts=24, num_dropped=40, num_episodes=1)
