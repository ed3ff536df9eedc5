"""PPO on text: prompt files, rewards by name and by model, the supervised mix, the exported policy."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers import SHARED
from peft import PeftModel
from tiny_llama import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from multipack.data.collate import PackedCollator
from multipack.train.data.builtin import byte_tokenizer
from multipack.train.data.prepare import prepare_data
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.model import build_model
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.main import plan_run, train
from multipack.train.ppo.model import ppo_model_config
from multipack.train.process import process_group

TEXT = {
    "task": "prompts",
    "max_prompt_tokens": 24,
    "max_new_tokens": 8,
    "rollout_batch_size": 4,
    "train_batch_size": 4,
    "num_update_steps": 1,
    "micro_batch_tokens": 512,
    "seed": 0,
}


@pytest.fixture
def alone():
    with process_group() as device:
        yield device


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {i}" * (i % 3 + 1)}) + "\n" for i in range(12)))
    return str(path)


def test_prompt_file_with_supervised_mix(alone, tmp_path, tokenizer_folder, prompts):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"The answer is {i}."}) + "\n" for i in range(10)))
    config = PPOConfig(
        **TEXT,
        prompts=prompts,
        tokenizer=tokenizer_folder,
        reward="train.ppo.ppo_worker:even_share",
        ptx_coef=1.0,
        ptx_data=str(rows),
        num_episodes=4,
        learning_rate=3e-3,
        temperature=0.9,
        output_dir=str(tmp_path / "out"),
    )
    # All rows fit one bin, so the first mix is over all of them: the mean loss of the untrained model.
    supervised = config.supervised(data=str(rows), sequence_len=512)
    data = prepare_data(supervised).train
    model = build_model(config.supervised(), ppo_model_config(config, 262), bf16=False)
    batch = PackedCollator()(data.__getitems__(range(10)))
    with torch.no_grad():
        right = causal_lm_loss_sum(model, batch).item() / batch["num_target_tokens"]

    history = train(plan_run(config), alone).history
    assert len(history) == 12
    assert history[0]["ptx_loss"] == pytest.approx(right, abs=1e-5)
    assert history[-1]["ptx_loss"] < right - 0.5
    assert all(math.isfinite(metrics["policy_loss"]) for metrics in history)

    # The policy is left as a folder that others load.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert loaded.config.vocab_size == 262
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "model").eos_token == "<|end|>"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_local_model_with_an_adapter(alone, tmp_path, tokenizer_folder, prompts):
    base = tiny_llama(vocab_size=262)
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    config = PPOConfig(
        **TEXT,
        prompts=prompts,
        base_model=str(tmp_path / "base"),
        reward="train.ppo.ppo_worker:even_share",
        adapter="lora",
        lora_target_linear=True,
        learning_rate=1e-2,
        output_dir=str(tmp_path / "out"),
    )
    history = train(plan_run(config), alone).history
    # The adapter begins as nothing, so the policy begins as its own reference, and then leaves it.
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert history[-1]["kl"] > 0.0
    adapted = PeftModel.from_pretrained(
        tiny_llama(vocab_size=262, attention="sdpa"), tmp_path / "out" / "model"
    )
    moved = [p.abs().max().item() for name, p in adapted.named_parameters() if "lora_B" in name]
    assert min(moved) > 0.0


def reward_model_folder(folder, num_labels):
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=num_labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def test_run_with_a_reward_model(alone, tmp_path, tokenizer_folder, prompts):
    config = PPOConfig(
        **TEXT,
        prompts=prompts,
        tokenizer=tokenizer_folder,
        reward_model=reward_model_folder(tmp_path / "judge", 1),
        output_dir=str(tmp_path / "out"),
    )
    history = train(plan_run(config), alone).history
    assert len(history) == 3
    assert all(metrics["reward"] != 0.0 for metrics in history)


@pytest.mark.shared
def test_gsm8k_with_a_real_tokenizer(alone, tmp_path):
    # A random model answers nothing right; what is tested is the way from the file to the reward.
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"What is {i} plus {i}?", "answer": f"#### {2 * i}", "input": None} for i in range(8)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PPOConfig(
        **{**TEXT, "task": "gsm8k", "max_prompt_tokens": 40},
        prompts=str(questions),
        tokenizer=str(SHARED / "data/tokenizers/smollm2"),
        output_dir=str(tmp_path / "out"),
    )
    run = plan_run(config)
    assert run.task.prompts[3]["answer"] == "6"
    assert run.task.prompts[3]["text"].endswith("<|im_start|>assistant\n")
    history = train(run, alone).history
    assert [metrics["reward"] for metrics in history] == [0.0, 0.0]
    assert all(metrics["num_optimizer_steps"] == 1 for metrics in history)
