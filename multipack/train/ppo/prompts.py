"""Deal the prompts of a run to ranks.

Each episode takes every prompt once, over all ranks, in an order that the seed and the episode name. A
collect step takes the same prompts whatever the number of ranks; only who generates which of them differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from multipack.order.batch import Place
from multipack.order.orders import Permutation, RowOrder, Rows, torch_permutation
from multipack.order.plan import EpochPlan
from multipack.order.sampler import DistributedBatchSampler
from multipack.train.ppo.sizes import PPOSizes


def deal_prompts(
    sizes: PPOSizes,
    num_prompts: int,
    *,
    num_episodes: int,
    seed: int,
    rank: int,
    first_collect_step: int = 0,
    permutation: Permutation = torch_permutation,
) -> Iterator[list[int]]:
    """Prompt rows of this rank for each collect step from `first_collect_step` to the end of the run.

    The last collect step of an episode has what is left over; with fewer prompts than ranks some ranks get
    none, and an empty list says so.
    """
    order = RowOrder(num_prompts, seed=seed, permutation=permutation)
    sampler = DistributedBatchSampler(order, num_replicas=sizes.num_replicas, rank=rank, tail="split")
    first_episode, skipped = divmod(first_collect_step, -(-len(sampler) // sizes.prompts_per_rank))
    for episode in range(first_episode, num_episodes):
        mine = itertools.islice(sampler.read(Place(episode)), skipped * sizes.prompts_per_rank, None)
        while batches := list(itertools.islice(mine, sizes.prompts_per_rank)):
            yield [row for batch in batches if not batch.repeated for row in batch]
        skipped = 0


def permutation_of_old_checkpoints(num_prompts: int, seed: int, episode: int) -> Rows:
    """The order of prompts in runs that were saved before prompts had an order of their own: a plan of bins
    of one prompt each."""
    plan = EpochPlan(np.ones(num_prompts, np.int64), 1, seed=seed, epoch=episode)
    return np.concatenate(plan.bins(0, num_prompts))
