"""Sample responses to this rank's prompts.

The rule that makes runs comparable: a sequence draws from random numbers of its own, named by (seed, collect
step, prompt row), and from nothing else. So no two ranks repeat each other, any number of ranks samples the
same responses, and a resumed run goes on with the ones it would have drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList


@dataclass(frozen=True)
class Responses:
    """What a policy answered, in the order of the prompts."""

    token_ids: list[npt.NDArray[np.int64]]
    """Tokens of each response, the end token included where one was sampled; at least one each."""
    finished: npt.NDArray[np.bool_]
    """Whether the response ended by the end token; the others were cut off at the limit."""
    logprobs: list[npt.NDArray[np.float32]]
    """Log-probability of each token in the distribution it was drawn from, nats, as the generating forward
    saw it."""


def sequence_uniforms(
    seed: int, collect_step: int, rows: Sequence[int], num_tokens: int
) -> npt.NDArray[np.float64]:
    """One number in 0..1 for each possible token, shape [len(rows), num_tokens]; the same for the same
    names."""
    numbers = [np.random.default_rng([seed, collect_step, row]).random(num_tokens) for row in rows]
    return np.array(numbers, np.float64).reshape(len(rows), num_tokens)


def generate_responses(
    policy: Any,
    prompts: Sequence[npt.NDArray[Any]],
    uniforms: npt.NDArray[np.float64],
    *,
    eos_token_id: int,
    pad_token_id: int,
    temperature: float = 1.0,
    batch_size: int | None = None,
) -> Responses:
    """Sample a response to each prompt with the library's key-value cache.

    The policy must hold whole parameters and use a stock attention. Ranks may have any number of prompts,
    also none.

    Args:
        policy: a transformers causal language model in eval mode.
        prompts: token ids, at least one each.
        uniforms: shape [len(prompts), max_new_tokens], float64 in [0, 1): token t of response i is the one
            whose probability mass covers `uniforms[i, t]`.
        temperature: divides the logits; above 0.
        batch_size: prompts generated at once; None takes all. Prompts of a batch have similar lengths.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    by_length = np.argsort(lengths, kind="stable")
    size = batch_size or max(len(prompts), 1)
    answers: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
    for start in range(0, len(prompts), size):
        chosen = by_length[start : start + size]
        sampled, logprobs = _generate_batch(
            policy, [prompts[i] for i in chosen], uniforms[chosen], eos_token_id, pad_token_id, temperature
        )
        for row, ids, of_ids in zip(chosen.tolist(), sampled, logprobs, strict=True):
            ended = _until_end(ids, eos_token_id)
            answers[row] = ended, of_ids[: len(ended)]
    ordered = [answers[i] for i in range(len(prompts))]
    return Responses(
        token_ids=[ids for ids, _ in ordered],
        finished=np.array([ids[-1] == eos_token_id for ids, _ in ordered], np.bool_),
        logprobs=[logprobs for _, logprobs in ordered],
    )


def left_padded(prompts: Sequence[npt.NDArray[Any]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [prompts, longest], so that all prompts end where sampling
    begins."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = np.full((len(prompts), longest), pad_token_id, np.int64)
    attention_mask = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = prompt
        attention_mask[row, longest - len(prompt) :] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(attention_mask)


class UniformSampling(LogitsProcessor):  # type: ignore[misc]
    """Leaves each sequence the one token that its own uniform number names, so that greedy decoding samples.

    Args:
        uniforms: float64 [sequences, max_new_tokens], on the device of the policy.
        prompt_width: tokens of the padded prompts.
    """

    def __init__(self, uniforms: Tensor, prompt_width: int, temperature: float) -> None:
        self._uniforms = uniforms
        self._prompt_width = prompt_width
        self._temperature = temperature
        self.logprobs: list[Tensor] = []
        """Of the tokens chosen at each step, float32 [sequences]."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._prompt_width
        # 64-bit: with a vocabulary of 10^5, sums of float32 would move the borders between tokens visibly.
        probabilities = torch.softmax(scores.double() / self._temperature, -1)
        mass = probabilities.cumsum(-1)
        target = self._uniforms[:, step : step + 1] * mass[:, -1:]
        tokens = torch.searchsorted(mass, target, right=True).clamp_(max=scores.shape[-1] - 1)
        self.logprobs.append(probabilities.gather(1, tokens)[:, 0].log().float())
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


@torch.no_grad()
def _generate_batch(
    policy: Any,
    prompts: Sequence[npt.NDArray[Any]],
    uniforms: npt.NDArray[np.float64],
    eos_token_id: int,
    pad_token_id: int,
    temperature: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sampled tokens and their log-probabilities, shape [prompts, tokens of the longest response]; what
    follows an end token is padding."""
    input_ids, attention_mask = left_padded(prompts, pad_token_id)
    sampling = UniformSampling(torch.from_numpy(uniforms).to(policy.device), input_ids.shape[1], temperature)
    settings = GenerationConfig(
        max_new_tokens=uniforms.shape[1],
        do_sample=False,
        use_cache=True,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    with _without_habits(policy):
        generated = policy.generate(
            input_ids=input_ids.to(policy.device),
            attention_mask=attention_mask.to(policy.device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampling]),
            synced_gpus=False,  # parameters are whole here: ranks may stop at different lengths, none waits for another
        )
    sampled: npt.NDArray[np.int64] = generated[:, input_ids.shape[1] :].cpu().numpy()
    return sampled, torch.stack(sampling.logprobs, 1).cpu().numpy()


@contextlib.contextmanager
def _without_habits(policy: Any) -> Iterator[None]:
    """Put the model's own generation settings away: a penalty or a banned token would change the distribution
    that PPO believes the tokens came from."""
    habits = policy.generation_config
    policy.generation_config = GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = habits


def _until_end(token_ids: npt.NDArray[np.int64], eos_token_id: int) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(token_ids == eos_token_id)
    return token_ids[: ends[0] + 1] if len(ends) else token_ids
