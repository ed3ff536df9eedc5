"""From a PPO configuration to its task: prompts that fit and a judge."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from multipack.train.data.tokenizer import load_tokenizer
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.reward import RewardFunction
from multipack.train.ppo.reward_model import RewardModel
from multipack.train.ppo.sizes import PPOSizes, check_prompts
from multipack.train.ppo.tasks import (
    VOCABULARY,
    Task,
    class_token_task,
    gsm8k_task,
    load_reward,
    prompt_file_task,
)

logger = logging.getLogger(__name__)


def load_task(config: PPOConfig, sizes: PPOSizes) -> tuple[Task, int]:
    """The task with the prompts that fit, and the size of its vocabulary; loads no model but the judge.

    Raises:
        ValueError: a prompt is empty or too long, or too few are left for one optimizer step.
    """
    if config.task == "class_tokens":
        task = class_token_task(config.num_prompts, config.seed, config.max_new_tokens)
        size = VOCABULARY
    else:
        tokenizer = load_tokenizer(config.supervised())
        size = len(tokenizer)
        assert config.prompts is not None
        if config.task == "gsm8k":
            task = gsm8k_task(config.prompts, tokenizer)
        else:
            task = prompt_file_task(config.prompts, tokenizer, _judge(config, tokenizer), config.prompt_field)
    kept = _fitting(task, config)
    check_prompts(sizes, len(kept.prompts), len(task.prompts) - len(kept.prompts), config.num_episodes)
    return kept, size


def _judge(config: PPOConfig, tokenizer: Any) -> RewardFunction:
    if config.reward is not None:
        return load_reward(config.reward)
    assert config.reward_model is not None
    return RewardModel(
        config.reward_model,
        pad_token_id=tokenizer.pad_token_id,
        batch_size=config.reward_batch_size_per_rank,
        trust_remote_code=config.trust_remote_code,
    )


def _fitting(task: Task, config: PPOConfig) -> Task:
    """The task without prompts above the limit, where they may be dropped."""
    lengths = [len(prompt["input_ids"]) for prompt in task.prompts]
    if 0 in lengths:
        raise ValueError(
            f"Prompt {lengths.index(0)} has no token, so nothing could be generated from it: remove it."
        )
    limit = config.max_prompt_tokens
    num_long = sum(length > limit for length in lengths)
    if not num_long:
        return task
    if config.overlong_prompts == "error":
        raise ValueError(
            f"{num_long} of {len(lengths)} prompts are longer than max_prompt_tokens {limit}; the longest has {max(lengths)} "
            "tokens. Raise max_prompt_tokens (and micro_batch_tokens), or set overlong_prompts to drop."
        )
    logger.warning("%d of %d prompts are longer than %d tokens and dropped", num_long, len(lengths), limit)
    kept = [prompt for prompt, length in zip(task.prompts, lengths, strict=True) if length <= limit]
    return replace(task, prompts=kept)
