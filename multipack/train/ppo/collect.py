"""Generate from this rank's prompts, ask for rewards, exchange: one buffer of experience, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from multipack.train.engine import Engine
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.exchange import together
from multipack.train.ppo.generate import Responses, sequence_uniforms
from multipack.train.ppo.phases import Phases
from multipack.train.ppo.reward import token_rewards
from multipack.train.ppo.rollouts import Rollouts, exchange_rollouts, make_rollouts
from multipack.train.ppo.tasks import Task


def collect(
    engine: Engine, task: Task, prompt_rows: Mapping[int, Sequence[int]], config: PPOConfig, phases: Phases
) -> Rollouts:
    """The rollouts of one iteration, of all ranks; a collective call.

    Args:
        prompt_rows: this rank's prompts of each collect step of the iteration, by the number of the collect step; a rank
            may have none.
        phases: gets the times of "generation", "reward" and "exchange".

    Raises:
        RuntimeError: generation or the reward failed on some rank; every rank raises, none is left waiting.
    """
    with phases("generation"):
        responses = _generate(engine, task, prompt_rows, config)
    with phases("reward"):
        shares = _reward(task, prompt_rows, responses)
    with phases("exchange"):
        return exchange_rollouts(shares)


def _generate(
    engine: Engine, task: Task, prompt_rows: Mapping[int, Sequence[int]], config: PPOConfig
) -> list[Responses]:
    """Responses to this rank's prompts, one entry a collect step."""
    # Gathered once for all collect steps: each rank then generates at its own pace.
    with engine.gathered(), together("Generation"):
        return [
            engine.infer(partial(_respond, task, rows, collect_step, config))
            for collect_step, rows in prompt_rows.items()
        ]


def _respond(task: Task, rows: Sequence[int], collect_step: int, config: PPOConfig, model: Any) -> Responses:
    responses: Responses = model.respond(
        [np.asarray(task.prompts[row]["input_ids"], np.int64) for row in rows],
        sequence_uniforms(config.seed, collect_step, rows, config.max_new_tokens),
        eos_token_id=task.eos_token_id,
        pad_token_id=task.pad_token_id,
        batch_size=config.generation_batch_size_per_rank,
    )
    return responses


def _reward(
    task: Task, prompt_rows: Mapping[int, Sequence[int]], responses: Sequence[Responses]
) -> list[Rollouts]:
    shares = []
    with together("The reward"):
        for (collect_step, rows), answered in zip(prompt_rows.items(), responses, strict=True):
            prompts = task.prompt_rows(rows)
            rewards, scores = token_rewards(task.reward, prompts, task.response_rows(answered.token_ids))
            token_ids = [prompt["input_ids"] for prompt in prompts]
            shares.append(
                make_rollouts(
                    collect_step, rows, token_ids, answered.token_ids, answered.finished, rewards, scores
                )
            )
    return shares
