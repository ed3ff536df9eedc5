"""Score a buffer: old log-probabilities, reference log-probabilities and values of every action token.

Each rank scores its share of packed micro-batches, planned as in an update and run through the same forward,
and all ranks end up with all scores.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from multipack.train.engine import Engine
from multipack.train.ppo.advantage import FloatArray
from multipack.train.ppo.buffer import actions_of, as_dataset, micro_batches
from multipack.train.ppo.exchange import gather_ragged
from multipack.train.ppo.rollouts import IntArray, Rollouts, row_elements
from multipack.train.ppo.update_plan import StepPlan, plan_step


class BufferScores(NamedTuple):
    """float32 arrays over the action tokens of the buffer."""

    logprobs: FloatArray
    """Under the policy that sampled, by the path of the update."""
    reference_logprobs: FloatArray
    values: FloatArray
    entropy: FloatArray


def score(
    engine: Engine, rollouts: Rollouts, *, micro_batch_tokens: int, hidden_size: int, num_workers: int
) -> BufferScores:
    """Score all rollouts; a collective call.

    Args:
        micro_batch_tokens: token slots of a micro-batch of one rank.
        hidden_size: of the model, for the balance of ranks.
    """
    rank, num_replicas = dist.get_rank(), dist.get_world_size()
    everything = np.arange(len(rollouts), dtype=np.int64)
    plan = plan_step(
        rollouts.lengths,
        everything,
        micro_batch_tokens=micro_batch_tokens,
        num_replicas=num_replicas,
        hidden_size=hidden_size,
    )
    local = [np.zeros((4, 0), np.float32)]
    for batch in micro_batches(as_dataset(rollouts, {}), [plan], rank, num_workers, engine.device):
        local.append(engine.infer(partial(_score_batch, batch)).cpu().numpy())
    return _gather_scores(np.concatenate(local, 1), rollouts, plan, num_replicas)


def _score_batch(batch: dict[str, Any], model: Any) -> torch.Tensor:
    """float32 [4, action_tokens], in the order of `BufferScores`."""
    actions = actions_of(batch)
    scores = model(*actions)
    reference = model.reference_logprobs(*actions)
    return torch.stack([scores.logprobs, reference, scores.values, scores.entropy])


def _gather_scores(local: FloatArray, rollouts: Rollouts, plan: StepPlan, num_replicas: int) -> BufferScores:
    order = [rows_of_rank(plan, rank) for rank in range(num_replicas)]
    counts = [int(rollouts.response_lengths[rows].sum()) for rows in order]
    places = row_elements(rollouts.response_lengths, np.concatenate(order))
    columns = []
    for mine in local:
        column = np.empty(len(rollouts.rewards), np.float32)
        column[places] = gather_ragged(np.ascontiguousarray(mine), counts)
        columns.append(column)
    return BufferScores(*columns)


def rows_of_rank(plan: StepPlan, rank: int) -> IntArray:
    """Rows that a rank's micro-batches hold, in their order; repeats are left out."""
    return np.array([row for step in plan if not step[rank].repeated for row in step[rank]], np.int64)
