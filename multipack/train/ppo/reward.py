"""Ask for rewards and check the answer before it can reach a loss.

A reward is any callable `reward(prompts, responses)`. Both arguments are lists of dicts, one a sequence: a
prompt is its row of the prompt set (`input_ids`, `text` where there is a tokenizer, and every other column,
such as the right answer); a response has `input_ids` (the end token included, where one was sampled) and
`text`. It returns one entry a
sequence: a number, which is given at the last token, or one number a response token.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multipack.train.ppo.advantage import FloatArray

Row = dict[str, Any]
RewardFunction = Callable[[list[Row], list[Row]], Sequence[Any]]


def token_rewards(
    reward: RewardFunction, prompts: list[Row], responses: list[Row], places: Sequence[str] | None = None
) -> tuple[FloatArray, FloatArray]:
    """Rewards of every response token, one response after the other, and every sequence's total.

    Args:
        reward: the callable, see above.
        prompts, responses: one dict a sequence.
        places: where each prompt comes from, such as "p.jsonl, line 7", for messages; None numbers the
            sequences.

    Returns:
        Rewards of all response tokens, float32, shape [sum of response lengths], and scores, float32, shape
        [sequences]. A response without tokens has nothing to give its reward to: it counts in the scores
        alone.

    Raises:
        ValueError: the callable raises, returns no sequence, the wrong number of rewards, the wrong number
            for the tokens of a response, or one that is not finite; the message names the prompt.
        TypeError: an entry is no number.
    """
    if not prompts:
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    named = [f"response {i}" for i in range(len(prompts))]
    if places is not None:
        named = [f"{name} ({place})" for name, place in zip(named, places, strict=True)]
    answers = _asked(reward, prompts, responses, named)
    per_token = [
        _spread(name, answer, len(response["input_ids"]))
        for name, answer, response in zip(named, answers, responses, strict=True)
    ]
    scores = np.array([_total(answer) for answer in answers], np.float32)
    return np.concatenate(per_token), scores


def described(error: Exception) -> str:
    """Type, text and innermost place of an exception of the user's code, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _asked(
    reward: RewardFunction, prompts: list[Row], responses: list[Row], named: Sequence[str]
) -> Sequence[Any]:
    """What the callable returns, known to have one entry a response."""
    try:
        answers = reward(prompts, responses)
    except Exception as error:
        raise ValueError(
            f"The reward function raises {described(error)}, {_culprit(reward, prompts, responses, named)}. "
            "Correct it, or the prompts."
        ) from error
    try:
        count = len(answers)
    except TypeError:
        raise ValueError(
            f"The reward function returned {answers!r} for {len(responses)} responses. Return one entry a "
            "response."
        ) from None
    if count != len(responses):
        raise ValueError(
            f"The reward function returned {count} rewards for {len(responses)} responses; "
            "rewards would reach the wrong sequences. Return one entry a response, in their order."
        )
    return answers


def _culprit(reward: RewardFunction, prompts: list[Row], responses: list[Row], named: Sequence[str]) -> str:
    """The first response for which the callable also fails alone, else all that it was asked about."""
    for prompt, response, name in zip(prompts, responses, named, strict=True):
        try:
            reward([prompt], [response])
        except Exception:  # noqa: BLE001  (the user's code may raise anything; the first error is the one reported)
            return f"at {name}"
    return f"at the {len(named)} responses from {named[0]} to {named[-1]} together"


def _spread(name: str, answer: Any, num_tokens: int) -> FloatArray:
    numbers = _numbers(name, answer)
    if numbers.ndim == 0:
        rewards = np.zeros(num_tokens, np.float32)
        rewards[-1:] = numbers
        return rewards
    if numbers.shape != (num_tokens,):
        raise ValueError(
            f"The reward function returned rewards of the shape {numbers.shape} for {name} of {num_tokens} "
            "tokens. Return one number for the sequence or one for each of its tokens."
        )
    return numbers


def _numbers(name: str, answer: Any) -> FloatArray:
    try:
        numbers = np.asarray(answer, np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The reward of {name} is {answer!r}; a number or a list of numbers was expected."
        ) from error
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"The reward of {name} is {answer!r}: one such reward makes every weight NaN. "
            "Let the reward function return finite numbers."
        )
    return numbers


def _total(answer: Any) -> float:
    return float(np.sum(np.asarray(answer, np.float64)))
