"""From a PPO configuration to its task: prompts that fit, a reward, and prompts held out for evaluation."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from multipack.train.data.prepare import split_rows
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


class LoadedTask(NamedTuple):
    """Prompts to train on and to evaluate on."""

    train: Task
    held_out: Task | None
    """The same reward on `val_set_size` prompts that are never trained on; None without any."""
    vocabulary: int
    """Tokens of the task."""


def load_task(config: PPOConfig, sizes: PPOSizes) -> LoadedTask:
    """The task with the prompts that fit; loads no weights.

    Raises:
        ValueError: a prompt is malformed, empty or too long, or too few are left for one optimizer step.
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
            task = prompt_file_task(
                config.prompts, tokenizer, _reward(config, tokenizer), config.prompt_field
            )
    kept = _fitting(task, config)
    num_dropped, held_out = len(task.prompts) - len(kept.prompts), None
    if config.val_set_size:
        train_rows, held_out_rows = split_rows(len(kept.prompts), config.val_set_size, config.seed)
        held_out, kept = kept.subset(held_out_rows.tolist()), kept.subset(train_rows.tolist())
    check_prompts(sizes, len(kept.prompts), num_dropped, config.num_episodes)
    return LoadedTask(kept, held_out, size)


def _reward(config: PPOConfig, tokenizer: Any) -> RewardFunction:
    if config.reward is not None:
        return load_reward(config.reward)
    assert config.reward_model is not None
    return RewardModel(
        config.reward_model,
        batch_size=config.reward_batch_size_per_rank,
        longest=config.longest_sequence,
        tokenizer=tokenizer,
        trust_remote_code=config.trust_remote_code,
    )


def _fitting(task: Task, config: PPOConfig) -> Task:
    """The task without prompts above the limit, where they may be dropped."""
    lengths = [len(prompt["input_ids"]) for prompt in task.prompts]
    if 0 in lengths:
        raise ValueError(
            f"{task.place(lengths.index(0))} has no token, so nothing could be generated from it: remove it."
        )
    limit = config.max_prompt_tokens
    num_long = sum(length > limit for length in lengths)
    if not num_long:
        return task
    if config.overlong_prompts == "error":
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        raise ValueError(
            f"{num_long} of {len(lengths)} prompts are longer than max_prompt_tokens {limit}; the longest "
            f"has {lengths[longest]} tokens ({task.place(longest)}). Raise max_prompt_tokens (and "
            "micro_batch_tokens), or set overlong_prompts to drop."
        )
    logger.warning("%d of %d prompts are longer than %d tokens and dropped", num_long, len(lengths), limit)
    return task.subset([row for row, length in enumerate(lengths) if length <= limit])
