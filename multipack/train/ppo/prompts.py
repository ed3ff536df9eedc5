"""Deal the prompts of a run to ranks.

Each episode takes every prompt once, over all ranks, in an order that the seed and the episode name. A collect step takes
the same prompts whatever the number of ranks; only who generates which of them differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.train.ppo.sizes import PPOSizes


def deal_prompts(
    sizes: PPOSizes,
    num_prompts: int,
    *,
    num_episodes: int,
    seed: int,
    rank: int,
    first_collect_step: int = 0,
) -> Iterator[list[int]]:
    """Prompt rows of this rank for each collect step from `first_collect_step` to the end of the run.

    The last collect step of an episode has what is left over; with fewer prompts than ranks some ranks get none, and an
    empty list says so.
    """
    # Each prompt is a bin of its own: prompts are counted here, their tokens are packed with those of the responses later.
    in_order = MultipackBatchSampler(np.ones(num_prompts, np.int64), 1, seed=seed)
    sampler = DistributedBatchSampler(in_order, num_replicas=sizes.num_replicas, rank=rank, tail="split")
    first_episode, skipped = divmod(first_collect_step, -(-len(sampler) // sizes.prompts_per_rank))
    for episode in range(first_episode, num_episodes):
        sampler.set_epoch(episode)
        mine = itertools.islice(sampler.begin(), skipped * sizes.prompts_per_rank, None)
        while batches := list(itertools.islice(mine, sizes.prompts_per_rank)):
            yield [row for batch in batches if not batch.repeated for row in batch]
        skipped = 0
