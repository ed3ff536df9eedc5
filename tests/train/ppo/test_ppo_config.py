"""What a PPO configuration refuses, before anything is loaded."""

from __future__ import annotations

import pytest

from multipack.train.ppo.config import PPOConfig, load_ppo_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"discount": 1.5}, r"discount is 1.5; it must be within 0..1"),
        ({"gae_lambda": -0.1}, r"gae_lambda is -0.1; it must be within 0..1"),
        ({"clip_range": float("nan")}, "clip_range is nan"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"kl_target": 0.0}, "kl_target is 0.0"),
        ({"save_iterations": 0}, "save_iterations is 0"),
        ({"micro_batch_tokens": 27}, r"12 \+ max_new_tokens 16 = 28 tokens do not fit micro_batch_tokens 27"),
        ({"task": "gsm8k", "tokenizer": "x"}, "task gsm8k and prompts None"),
        ({"prompts": "p.jsonl"}, "class_tokens makes its prompts"),
        ({"task": "gsm8k", "prompts": "p.jsonl"}, "needs a tokenizer"),
        ({"task": "prompts", "prompts": "p", "tokenizer": "t"}, "needs one reward and has 0"),
        (
            {"task": "prompts", "prompts": "p", "tokenizer": "t", "reward": "a:b", "reward_model": "m"},
            "one reward and has 2",
        ),
        ({"reward": "a:b"}, "has a reward of its own but reward is set"),
        ({"base_model": "m"}, "token ids of its own"),
        ({"ptx_coef": 0.5}, "needs a weight and data"),
        ({"ptx_bins_per_step": 2}, "ptx_data is not set, so there is nothing to mix in"),
        ({"ptx_coef": 0.5, "ptx_data": "rows.jsonl"}, "ptx_data is text"),
        ({"offload": True}, "offload is true with zero_stage 0"),
        ({"adapter": "lora"}, "lora_target_linear"),
        ({"learning_rate": 0.0}, "learning_rate is 0"),
        ({"warmup_steps": 3}, "constant has no warm-up"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


def test_longest_sequence_may_fill_a_micro_batch():
    assert PPOConfig(micro_batch_tokens=28).longest_sequence == 28


def test_file_and_command_line(tmp_path):
    file = tmp_path / "run.yml"
    file.write_text("rollout_batch_size: 32\nlora_r: 4\n")
    config = load_ppo_config(["--config", str(file), "--num-update-steps", "2", "--rollout_batch_size=8"])
    assert (config.rollout_batch_size, config.lora_r, config.num_update_steps) == (8, 4, 2)


def test_misspelt_key_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean train_batch_size"):
        load_ppo_config(["--train_batchsize", "2"])


def test_shared_keys_reach_supervised_training():
    config = PPOConfig(zero_stage=2, learning_rate=0.5, adam_epsilon=0.25, output_dir="x")
    shared = config.supervised(data="d.jsonl")
    assert (shared.zero_stage, shared.learning_rate, shared.adam_epsilon) == (2, 0.5, 0.25)
    assert (shared.sequence_len, shared.data, shared.output_dir) == (28, "d.jsonl", "x")
