"""What the ranks sampled, as one buffer of rollouts that every rank holds whole.

Ragged arrays in one canonical order: by collect step, then by prompt row. It depends on no number of ranks,
so neither do the plans made over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from multipack.train.ppo.advantage import FloatArray
from multipack.train.ppo.exchange import gather_counts, gather_ragged
from multipack.train.ppo.generate import Responses

Scalar = TypeVar("Scalar", bound=np.generic)
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Prompts with their responses and rewards; n sequences."""

    collect_steps: IntArray
    """[n] Collect step of the run in which the response was sampled."""
    prompt_rows: IntArray
    """[n] Row of the prompt set."""
    prompt_lengths: IntArray
    """[n] Tokens of the prompt."""
    response_lengths: IntArray
    """[n] Tokens of the response, the end token included; 0 is allowed."""
    finished: npt.NDArray[np.bool_]
    """[n] Whether the response ended with an end token; the others met the length limit."""
    sequence_rewards: FloatArray
    """[n] Total reward of the sequence, without the KL penalty."""
    tokens: npt.NDArray[np.int32]
    """[sum of lengths] Prompt and response of the first sequence, of the second, ..."""
    rewards: FloatArray
    """[sum of response lengths] Reward of each response token, without the KL penalty."""
    sampling_logprobs: FloatArray
    """[sum of response lengths] Log-probability of each response token as the generating forward saw it,
    nats."""

    def __len__(self) -> int:
        return len(self.prompt_rows)

    @property
    def lengths(self) -> IntArray:
        """[n] Tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def action_offsets(self) -> IntArray:
        """[n + 1] Response s has the action tokens `action_offsets[s]:action_offsets[s + 1]`."""
        return offsets_of(self.response_lengths)

    @property
    def action_mask(self) -> npt.NDArray[np.bool_]:
        """[sum of lengths] True at response tokens."""
        pattern = np.tile([False, True], len(self))
        return np.repeat(pattern, np.stack([self.prompt_lengths, self.response_lengths], 1).ravel())


def offsets_of(lengths: IntArray) -> IntArray:
    """[n + 1] Boundaries of ragged rows of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def take_rows(values: npt.NDArray[Scalar], lengths: IntArray, rows: IntArray) -> npt.NDArray[Scalar]:
    """The ragged rows `rows` of `values`, one after the other, in that order."""
    return values[row_elements(lengths, rows)]


def row_elements(lengths: IntArray, rows: IntArray) -> IntArray:
    """Positions of all elements of the ragged rows `rows`, in that order."""
    chosen = lengths[rows]
    shift = offsets_of(lengths)[rows] - offsets_of(chosen)[:-1]
    return np.arange(int(chosen.sum()), dtype=np.int64) + np.repeat(shift, chosen)


def make_rollouts(
    collect_step: int,
    prompt_rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Responses,
    rewards: FloatArray,
    sequence_rewards: FloatArray,
) -> Rollouts:
    """One rank's share of one collect step; it may be empty."""
    answers = responses.token_ids
    sequences = [np.concatenate([prompt, ids]) for prompt, ids in zip(prompts, answers, strict=True)]
    return Rollouts(
        collect_steps=np.full(len(prompts), collect_step, np.int64),
        prompt_rows=np.array(prompt_rows, np.int64),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int64),
        response_lengths=np.array([len(ids) for ids in answers], np.int64),
        finished=responses.finished,
        sequence_rewards=sequence_rewards,
        tokens=np.concatenate([np.zeros(0, np.int32), *sequences]).astype(np.int32),
        rewards=rewards,
        sampling_logprobs=np.concatenate([np.zeros(0, np.float32), *responses.logprobs]),
    )


def exchange_rollouts(shares: Sequence[Rollouts]) -> Rollouts:
    """The rollouts of all ranks in canonical order; a collective call.

    Args:
        shares: this rank's collect steps, each may be empty.
    """
    local = Rollouts(
        **{f.name: np.concatenate([getattr(s, f.name) for s in shares]) for f in fields(Rollouts)}
    )
    counts = gather_counts(len(local))
    of_sequences: dict[str, Any] = {
        name: gather_ragged(getattr(local, name), counts)
        for name in (
            "collect_steps",
            "prompt_rows",
            "prompt_lengths",
            "response_lengths",
            "finished",
            "sequence_rewards",
        )
    }
    ends = offsets_of(np.array(counts, np.int64))
    lengths = of_sequences["prompt_lengths"] + of_sequences["response_lengths"]
    tokens = gather_ragged(local.tokens, _share_sizes(lengths, ends))
    action_lengths = of_sequences["response_lengths"]
    action_sizes = _share_sizes(action_lengths, ends)
    order = np.lexsort((of_sequences["prompt_rows"], of_sequences["collect_steps"]))
    return Rollouts(
        tokens=take_rows(tokens, lengths, order),
        rewards=take_rows(gather_ragged(local.rewards, action_sizes), action_lengths, order),
        sampling_logprobs=take_rows(
            gather_ragged(local.sampling_logprobs, action_sizes), action_lengths, order
        ),
        **{name: column[order] for name, column in of_sequences.items()},
    )


def _share_sizes(lengths: IntArray, ends: IntArray) -> list[int]:
    """Elements that each rank brings, from the lengths of all sequences and the boundaries of the ranks'
    shares."""
    return [int(lengths[start:end].sum()) for start, end in itertools.pairwise(ends)]
