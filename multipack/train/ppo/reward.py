"""Ask for rewards and check the answer before it can reach a loss.

A reward is any callable `reward(prompts, responses)`. Both arguments are lists of dicts, one a sequence: a prompt is
its row of the prompt set (`input_ids`, `text` where there is a tokenizer, and every other column, such as the right
answer); a response has `input_ids` (the end token included, where one was sampled) and `text`. It returns one entry a
sequence: a number, which is given at the last token, or one number a response token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multipack.train.ppo.advantage import FloatArray

Row = dict[str, Any]
RewardFunction = Callable[[list[Row], list[Row]], Sequence[Any]]


def token_rewards(
    reward: RewardFunction, prompts: list[Row], responses: list[Row]
) -> tuple[FloatArray, FloatArray]:
    """Rewards of every response token, one response after the other, and every sequence's total.

    Args:
        reward: the callable, see above.
        prompts, responses: one dict a sequence.

    Returns:
        Rewards of all response tokens, float32, shape [sum of response lengths], and scores, float32, shape [sequences].
        A response without tokens has nothing to give its reward to: it counts in the scores alone.

    Raises:
        ValueError: the wrong number of rewards, the wrong number for the tokens of a response, or one that is not finite.
        TypeError: an entry is no number.
        Whatever the callable raises.
    """
    if not prompts:
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    answers = reward(prompts, responses)
    if len(answers) != len(responses):
        raise ValueError(
            f"The reward function returned {len(answers)} rewards for {len(responses)} responses; "
            "rewards would reach the wrong sequences. Return one entry a response, in their order."
        )
    per_token = [
        _spread(index, answer, len(response["input_ids"]))
        for index, (answer, response) in enumerate(zip(answers, responses, strict=True))
    ]
    scores = np.array([_total(answer) for answer in answers], np.float32)
    return np.concatenate(per_token), scores


def _spread(index: int, answer: Any, num_tokens: int) -> FloatArray:
    numbers = _numbers(index, answer)
    if numbers.ndim == 0:
        rewards = np.zeros(num_tokens, np.float32)
        rewards[-1:] = numbers
        return rewards
    if numbers.shape != (num_tokens,):
        raise ValueError(
            f"The reward function returned rewards of the shape {numbers.shape} for response {index} of {num_tokens} "
            "tokens. Return one number for the sequence or one for each of its tokens."
        )
    return numbers


def _numbers(index: int, answer: Any) -> FloatArray:
    try:
        numbers = np.asarray(answer, np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The reward of response {index} is {answer!r}; a number or a list of numbers was expected."
        ) from error
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"The reward of response {index} is {answer!r}: one such reward makes every weight NaN. "
            "Let the reward function return finite numbers."
        )
    return numbers


def _total(answer: Any) -> float:
    return float(np.sum(np.asarray(answer, np.float64)))
