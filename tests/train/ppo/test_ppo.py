"""Whole PPO runs: equal on any number of ranks and any ZeRO stage, resumable, never silent about what cannot
train."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.ppo.ppo_worker import BASE, CELLS, config_of, train_cell
from train.ranks import run_ranks

from multipack.train.data.builtin import byte_tokenizer
from multipack.train.ppo import main as ppo
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.main import plan_run, train
from multipack.train.process import process_group

WORKER = Path(__file__).with_name("ppo_worker.py")
CLOCK = ("seconds", "_per_s", "tflops", "generation_share", "reward_share", "exchange_share", "scoring_share")
CLOCK += ("train_share", "wait_share")


def comparable(metrics):
    """What depends neither on the clock nor on how many ranks shared the work."""
    shared_work = ("num_micro_steps", "bin_fill")
    return {name: value for name, value in metrics.items() if not name.endswith(CLOCK + shared_work)}


def assert_same_run(mine, right, tolerance=1e-5):
    assert len(mine["history"]) == len(right["history"])
    for ours, theirs in zip(mine["history"], right["history"], strict=True):
        assert comparable(ours) == pytest.approx(
            comparable(theirs), abs=tolerance, rel=tolerance, nan_ok=True
        )
    assert mine["parameters"].keys() == right["parameters"].keys()
    for name, value in right["parameters"].items():
        torch.testing.assert_close(mine["parameters"][name], value, atol=tolerance, rtol=0, msg=name)


@pytest.fixture
def alone():
    """A process group of one, as a run without torchrun has it."""
    with process_group() as device:
        yield device


def text_config(folder):
    """A prompt file with a supervised mix of two bins a step, which is one bin for each of two ranks."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    prompts = [{"prompt": f"Say {i}" * (i % 3 + 1)} for i in range(12)]
    rows = [{"text": f"The answer is {i * i}." * (i % 4 + 1)} for i in range(40)]
    for name, content in (("prompts", prompts), ("rows", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return BASE | {
        "task": "prompts",
        "prompts": str(folder / "prompts.jsonl"),
        "tokenizer": str(folder / "tokenizer"),
        "reward": "train.ppo.ppo_worker:even_share",
        "max_prompt_tokens": 24,
        "max_new_tokens": 8,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "micro_batch_tokens": 96,
        "ptx_coef": 0.5,
        "ptx_data": str(folder / "rows.jsonl"),
        "ptx_bins_per_step": 2,
        "output_dir": str(folder / "text"),
    }


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_equal_one(alone, tmp_path):
    cells = [*CELLS, "errors", "text"]
    text = text_config(tmp_path)
    (tmp_path / "text.json").write_text(json.dumps(text | {"zero_stage": 3, "save_iterations": 1}))
    run_ranks(2, WORKER, tmp_path, *cells)
    two = torch.load(tmp_path / "results.pt")
    one = {cell: train_cell(config_of(cell, tmp_path / "one"), alone) for cell in ("0", "odd-0", "lora-2")}
    for cell in ("0", "1", "2", "3", "deepspeed-3"):
        assert len(two[cell]["history"]) == 3
        assert_same_run(two[cell], one["0"])
    for cell in ("odd-0", "odd-3"):
        assert_same_run(two[cell], one["odd-0"])
        assert two[cell]["kl_coef"] == pytest.approx(one["odd-0"]["kl_coef"])
    assert_same_run(two["lora-2"], one["lora-2"])

    mixed = PPOConfig(**text | {"output_dir": str(tmp_path / "one-text")})
    one["text"] = train_cell(mixed, alone)
    assert_same_run(two["text"], one["text"])
    assert len({metrics["ptx_loss"] for metrics in one["text"]["history"]}) == 3

    # Each prompt went to one rank, and all of them to some rank.
    for cell, num_prompts in (("0", 24), ("odd-0", 17), ("3", 24)):
        first, second = two[cell]["asked"]
        assert sorted(first + second) == list(range(num_prompts))
        assert abs(len(first) - len(second)) <= 1

    # A reward that breaks on rank 1 ends both ranks, with the reason.
    for fault, reason in (
        ("raises", "rank 1: ValueError: The reward function raises KeyError: 'no such answer'"),
        ("count", "rank 1: ValueError: The reward function returned 1 rewards for 4 responses"),
        ("nan", "rank 1: ValueError: The reward of response 0 (prompt "),
    ):
        assert all("The reward failed on 1 of 2 ranks" in said and reason in said for said in two[fault])

    # What two ranks saved after their first iteration, one rank finishes to the same end.
    resumed = replace(
        config_of("0", tmp_path / "resumed"),
        resume_from_checkpoint=str(tmp_path / "0" / "checkpoint-1"),
    )
    mixed = replace(
        mixed,
        output_dir=str(tmp_path / "resumed-text"),
        resume_from_checkpoint=str(tmp_path / "text" / "checkpoint-2"),
    )
    for config, right, done in ((resumed, one["0"], 1), (mixed, one["text"], 2)):
        finished = train_cell(config, alone)
        assert len(finished["history"]) == 3 - done
        assert_same_run(finished, {**right, "history": right["history"][done:]})


def test_resumed_run_equals_one_that_never_stopped(alone, tmp_path):
    config = {**BASE, "kl_target": 0.01, "kl_horizon": 50, "lr_scheduler": "linear", "num_episodes": 2}
    whole = PPOConfig(**config, output_dir=str(tmp_path), save_iterations=1, save_total_limit=9)
    right = train_cell(whole, alone)
    assert len({metrics["kl_coef"] for metrics in right["history"]}) == 6
    # Iteration 4 is in the second episode.
    for done in (2, 4):
        again = replace(
            whole,
            output_dir=str(tmp_path / f"from-{done}"),
            resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"),
        )
        resumed = train_cell(again, alone)
        assert_same_run(resumed, {**right, "history": right["history"][done:]}, tolerance=1e-7)
        assert resumed["kl_coef"] == right["kl_coef"]


def test_checkpoint_of_another_run_is_refused(alone, tmp_path):
    config = PPOConfig(**{**BASE, "num_prompts": 8}, output_dir=str(tmp_path))
    train(plan_run(config), alone)
    other = replace(config, seed=2, train_batch_size=4, resume_from_checkpoint="last")
    with pytest.raises(
        ValueError, match=r"another run: seed \(1 there, 2 here\), train_batch_size \(8 there, 4 here\)"
    ):
        train(plan_run(other), alone)


def test_finished_run_has_nothing_to_resume(alone, tmp_path, capsys):
    config = PPOConfig(**{**BASE, "num_prompts": 8}, output_dir=str(tmp_path))
    train(plan_run(config), alone)
    again = replace(config, resume_from_checkpoint="last")
    assert train(plan_run(again), alone).iteration == 1
    assert "at iteration 1 of 1: nothing is left to train" in capsys.readouterr().out
    # More episodes go on.
    longer = replace(again, num_episodes=2)
    assert train(plan_run(longer), alone).iteration == 2
    with pytest.raises(ValueError, match="at iteration 2, beyond the 1 of num_episodes 1"):
        train(plan_run(again), alone)


def test_a_new_run_does_not_mistake_earlier_checkpoints_for_its_own(alone, tmp_path):
    config = PPOConfig(**{**BASE, "num_prompts": 16}, output_dir=str(tmp_path))
    train(plan_run(config), alone)
    train(plan_run(replace(config, num_prompts=8)), alone)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2.undone",
    ]


def test_a_prompt_file_that_is_missing_ends_the_run_with_its_name(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    keys = {
        "task": "prompts",
        "prompts": tmp_path / "none.jsonl",
        "tokenizer": tmp_path / "tokenizer",
        "reward": "operator:add",
    }
    with pytest.raises(SystemExit, match=r"ppo: .*none\.jsonl"):
        ppo.main([f"--{key}={value}" for key, value in keys.items()])


def test_weights_that_are_lost_end_the_run_before_they_are_saved(alone, tmp_path):
    config = PPOConfig(
        **BASE | {"num_update_steps": 2},
        optimizer="sgd",
        learning_rate=1e30,
        max_grad_norm=0,
        output_dir=str(tmp_path),
    )
    with pytest.raises(FloatingPointError, match=r"at a learning rate of 1e\+30.*resume from a checkpoint"):
        train(plan_run(config), alone)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_reward_rises_on_the_class_token_task(alone, tmp_path):
    config = PPOConfig(num_prompts=64 * 25, seed=0, output_dir=str(tmp_path))
    history = train(plan_run(config), alone).history
    rewards = [metrics["reward"] for metrics in history]
    assert sum(rewards[:3]) / 3 == pytest.approx(0.125, abs=0.04)
    assert sum(rewards[-3:]) / 3 > 0.35
    assert all(metrics["num_optimizer_steps"] == 16 for metrics in history)

    # What a person sees.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == rewards
    shares = ("generation", "reward", "exchange", "scoring", "train", "wait")
    for line in lines:
        assert 0.9 < sum(line[f"{name}_share"] for name in shares) <= 1.0001
        assert line["tflops"] > 0
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoint-25").is_dir()


def test_every_response_may_end_at_once(alone, tmp_path):
    run = plan_run(PPOConfig(**{**BASE, "max_new_tokens": 1}, output_dir=str(tmp_path)))
    everything_ends = replace(run.task, reward=lambda prompts, responses: [1.0] * len(prompts))
    history = train(replace(run, task=everything_ends), alone).history
    assert len(history) == 3
    assert all(metrics["response_tokens"] == 1.0 for metrics in history)
    assert all(math.isfinite(metrics["policy_loss"]) for metrics in history)


def test_sigterm_saves_and_ends(alone, tmp_path, capsys):
    config = PPOConfig(**BASE, output_dir=str(tmp_path))
    run = plan_run(config)

    def killed(prompts, responses):
        os.kill(os.getpid(), signal.SIGTERM)
        return run.task.reward(prompts, responses)

    trainer = train(replace(run, task=replace(run.task, reward=killed)), alone)
    assert trainer.iteration == 1
    assert "stopped by SIGTERM after iteration 1" in capsys.readouterr().out
    finished = train(plan_run(replace(config, resume_from_checkpoint="last")), alone)
    assert finished.iteration == 3


def test_random_forward_is_found_before_the_first_step(alone, tmp_path, monkeypatch):
    monkeypatch.setattr("multipack.train.ppo.model.switch_dropout_off", lambda model: None)
    config = PPOConfig(**BASE, output_dir=str(tmp_path), overrides_of_model_config={"attention_dropout": 0.5})
    run = plan_run(config)
    with torch.random.fork_rng(), pytest.raises(RuntimeError, match="ratio would start away from 1"):
        train(run, alone)


# hpcaitech/ColossalAI#5066: buffer of 64, eight ranks; local batches of 8, 16 and 32 are 64, 128 and 256 over
# all ranks.
@pytest.mark.parametrize(("local_batch", "refused"), [(8, None), (16, "64 < 128"), (32, "64 < 256")])
def test_history_command_on_eight_simulated_ranks(local_batch, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    argv = [
        "--rollout_batch_size",
        "64",
        "--num_update_steps",
        "1",
        "--train_batch_size",
        str(8 * local_batch),
    ]
    if refused is None:
        run = plan_run(ppo.load_ppo_config([*argv, "--output_dir", str(tmp_path)]))
        assert run.sizes.steps_per_iteration == 1
    else:
        with pytest.raises(SystemExit, match=rf"ppo, rank 5: .*{refused}.*nothing would be trained"):
            ppo.main([*argv, "--output_dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_prompt_tokens": 8},
            r"\d+ of 24 prompts are longer than max_prompt_tokens 8; the longest has 12",
        ),
        (
            {"max_prompt_tokens": 8, "overlong_prompts": "drop", "num_prompts": 9},
            r"9 prompts, \d+ of them dropped",
        ),
        (
            {"overrides_of_model_config": {"max_position_embeddings": 27}},
            "28 tokens but the small Llama has 27 positions",
        ),
        ({"resume_from_checkpoint": "last"}, "has no checkpoint"),
        ({"rollout_batch_size": 3}, "3 < 8"),
    ],
)
def test_what_cannot_train_is_refused_before_the_model(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan_run(PPOConfig(**{**BASE, "output_dir": str(tmp_path)} | changes))
