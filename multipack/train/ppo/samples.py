"""Responses to read: a few of each iteration, with their prompts and rewards."""

from __future__ import annotations

from typing import Any

from multipack.train.ppo.rollouts import Rollouts
from multipack.train.ppo.tasks import Task

Sample = dict[str, Any]


def sample_rows(task: Task, rollouts: Rollouts, count: int) -> list[Sample]:
    """The first `count` responses of a buffer, which are the same ones on any number of ranks.

    Texts where the task has a tokenizer, special tokens included, so that an end can be seen; else token ids.
    """
    samples: list[Sample] = []
    end = 0
    for row in range(min(count, len(rollouts))):
        start, middle = end, end + int(rollouts.prompt_lengths[row])
        end = middle + int(rollouts.response_lengths[row])
        samples.append(
            {
                "place": task.place(int(rollouts.prompt_rows[row])),
                "reward": float(rollouts.sequence_rewards[row]),
                "finished": bool(rollouts.finished[row]),
                "prompt": _shown(task, rollouts.tokens[start:middle].tolist()),
                "response": _shown(task, rollouts.tokens[middle:end].tolist()),
            }
        )
    return samples


def _shown(task: Task, token_ids: list[int]) -> str | list[int]:
    return token_ids if task.tokenizer is None else task.tokenizer.decode(token_ids)
