"""What teaches nothing or cannot be trained on is said once, and moves no weight."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from multipack.train.data.builtin import byte_tokenizer
from multipack.train.ppo import main as ppo
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.main import plan_run, train
from multipack.train.process import process_group

REWARDS = """
def equal(prompts, responses):
    return [1.0] * len(responses)

def lengths(prompts, responses):
    return [float(len(row["input_ids"])) for row in responses]

def first_token(prompts, responses):
    return [float(prompt["input_ids"][0]) for prompt in prompts]

def raises(prompts, responses):
    return [1 / (prompt["input_ids"][0] - 9) for prompt in prompts]

def infinite(prompts, responses):
    return [float("inf") if prompt["input_ids"][0] == 9 else 0.0 for prompt in prompts]
"""


@pytest.fixture
def keys(tmp_path, monkeypatch):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rewards_of_test.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    prompts = [{"input_ids": [5 + i % 20, 6, 7]} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return {
        "tokenizer": str(tmp_path / "tokenizer"),
        "task": "prompts",
        "prompts": str(tmp_path / "prompts.jsonl"),
        "rollout_batch_size": 8,
        "train_batch_size": 4,
        "max_new_tokens": 8,
        "learning_rate": 1e-3,
        "output_dir": str(tmp_path / "out"),
    }


def trained(keys, reward, **more):
    config = PPOConfig(**keys | {"reward": f"rewards_of_test:{reward}"} | more)
    run = plan_run(config)
    with process_group() as device:
        trainer = train(run, device)
        return trainer.history, trainer.engine.full_parameters()


def told(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_equal_rewards_are_said_once_and_do_not_move_the_policy(keys, caplog, critic):
    with caplog.at_level(logging.WARNING):
        history, after = trained(keys, "equal", num_episodes=2, critic=critic, kl_coef=0.0)
    assert len(history) == 4
    assert [metrics["reward_std"] for metrics in history] == [0.0] * 4
    # Scored by the same path, so a policy that stayed the reference has exactly no divergence from it.
    assert [metrics["kl"] for metrics in history] == [0.0] * 4
    for name, value in after.items():
        if name.startswith("actor."):
            assert torch.equal(value, after[name.replace("actor.", "reference.", 1)]), name
    assert after["value_head.bias"].abs().max() > 0  # the critic does learn
    assert len(told(caplog, "all 8 rewards are 1, so no response is better than another")) == 1


def test_rewards_that_differ_move_it_and_nothing_is_said(keys, caplog):
    with caplog.at_level(logging.WARNING):
        history, _ = trained(keys, "first_token", num_episodes=2)
    assert history[-1]["kl"] > 0
    assert not told(caplog, "no response is better")


def test_responses_without_end_are_said_once_and_can_be_penalised(keys, caplog):
    # Of 262 tokens one is the end: 16 responses of 8 tokens hold it with chance 0.4, these by their seed do
    # not.
    with caplog.at_level(logging.WARNING):
        history, _ = trained(keys, "equal", num_episodes=2, seed=1)
    plain = [metrics["finished_share"] for metrics in history]
    assert min(plain) == 0.0
    assert len(told(caplog, "ended within max_new_tokens 8")) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        history, _ = trained(keys, "equal", missing_eos_penalty=3.0, seed=1)
    for metrics, finished in zip(history, plain[:2], strict=True):
        assert metrics["reward"] == pytest.approx(1.0 - 3.0 * (1 - finished))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "raises",
            r"The reward function raises ZeroDivisionError: .*rewards_of_test.py, line 12\), at response \d ",
        ),
        ("infinite", r"The reward of response \d \(.*prompts.jsonl, line 5\) is inf"),
    ],
)
def test_a_reward_that_fails_is_one_line_with_file_and_row(keys, reward, message):
    arguments = [f"--{name}={value}" for name, value in keys.items()]
    with pytest.raises(SystemExit, match=message) as caught:
        ppo.main([*arguments, f"--reward=rewards_of_test:{reward}"])
    said = str(caught.value)
    assert said.startswith("ppo: The reward failed on 1 of 1 ranks")
    assert "prompts.jsonl, line 5" in said
    assert "\n" not in said


def test_sample_responses_and_a_held_out_evaluation_are_written(keys, tmp_path):
    history, _ = trained(
        keys,
        "first_token",
        val_set_size=4,
        num_episodes=2,
        eval_iterations=2,
        log_samples=2,
        rollout_batch_size=4,
    )
    assert len(history) == 6  # 12 of 16 prompts, two times, 4 an iteration
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    assert {line["num_prompts"] for line in evaluations} == {4}
    # The reward is the prompt's first token, so the held-out mean is fixed and tells which prompts are held
    # out.
    (held_out_reward,) = {line["reward"] for line in evaluations}
    whole = sum(5 + i % 20 for i in range(16))
    seen = sum(line["reward"] for line in lines if line["kind"] == "ppo" and line["step"] <= 3) * 4
    assert held_out_reward * 4 + seen == pytest.approx(whole)
    assert all(0 <= line["mismatch_kl"] < 1e-6 for line in lines if line["kind"] == "ppo")

    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * (6 + 4)
    for sample in samples:
        line = int(sample["place"].rpartition("line ")[2])
        assert sample["reward"] == 5 + (line - 1) % 20
        assert isinstance(sample["prompt"], str)
        assert isinstance(sample["response"], str)
    held_out = {sample["place"] for sample in samples if sample["kind"] == "eval"}
    trained_on = {sample["place"] for sample in samples if sample["kind"] == "ppo"}
    assert held_out
    assert not held_out & trained_on


def test_an_evaluation_needs_prompts():
    with pytest.raises(ValueError, match="eval_iterations is 2 but val_set_size is 0"):
        PPOConfig(eval_iterations=2)
