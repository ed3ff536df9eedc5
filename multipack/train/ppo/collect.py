"""Generate from this rank's prompts, ask for rewards, exchange: one buffer of experience, the same on every
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from multipack.train.engine import Engine
from multipack.train.ppo.advantage import FloatArray
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
        prompt_rows: this rank's prompts of each collect step of the iteration, by the number of the collect
            step; a rank may have none.
        phases: gets the times of "generation", "reward" and "exchange".

    Raises:
        RuntimeError: generation failed on some rank; every rank raises, none is left waiting.
        RunError: the reward did.
    """
    with phases("generation"):
        responses = _generate(engine, task, prompt_rows, config)
    with phases("reward"):
        shares = _reward(task, prompt_rows, responses, config.missing_eos_penalty)
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
    task: Task,
    prompt_rows: Mapping[int, Sequence[int]],
    responses: Sequence[Responses],
    missing_eos_penalty: float,
) -> list[Rollouts]:
    """This rank's rollouts, one entry a collect step, with the penalty of responses that were cut off."""
    shares = []
    with together("The reward", of_user=True):
        for (collect_step, rows), answered in zip(prompt_rows.items(), responses, strict=True):
            prompts = task.prompt_rows(rows)
            rewards, totals = token_rewards(
                task.reward,
                prompts,
                task.response_rows(answered.token_ids),
                [task.place(row) for row in rows],
            )
            _take_penalty(rewards, totals, answered, missing_eos_penalty)
            token_ids = [prompt["input_ids"] for prompt in prompts]
            shares.append(make_rollouts(collect_step, rows, token_ids, answered, rewards, totals))
    return shares


def _take_penalty(rewards: FloatArray, totals: FloatArray, answered: Responses, penalty: float) -> None:
    """Lower, in place, the reward at the last token of each response that was cut off."""
    lengths = np.array([len(ids) for ids in answered.token_ids], np.int64)
    cut_off = ~answered.finished
    totals[cut_off] -= penalty
    rewards[np.cumsum(lengths)[cut_off & (lengths > 0)] - 1] -= penalty
