"""Prompts are dealt by our own samplers: each once an episode, other ones on every rank."""

from __future__ import annotations

from itertools import chain

import pytest

from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.sizes import PPOSizes


def dealt(ranks, num_prompts, batch, episodes=1, seed=0, first=0):
    """[collect step][rank]: prompt rows."""
    sizes = PPOSizes(
        num_replicas=ranks,
        rollout_batch_size=batch,
        num_collect_steps=1,
        train_batch_size=ranks,
        update_mode="epochs",
        num_update_steps=1,
    )
    shares = [
        list(
            deal_prompts(
                sizes, num_prompts, num_episodes=episodes, seed=seed, rank=rank, first_collect_step=first
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1  # as many collect steps on every rank
    return [list(step) for step in zip(*shares, strict=True)]


def test_ranks_have_disjoint_prompts():
    # unslothai/unsloth-zoo#832: 8 prompts on 2 ranks; each rank began at prompt 0.
    (step,) = dealt(2, 8, 8)
    assert [len(rows) for rows in step] == [4, 4]
    assert sorted(step[0] + step[1]) == list(range(8))


@pytest.mark.parametrize(("num_prompts", "right"), [(30, [16, 14]), (20, [16, 4]), (10, [10]), (17, [16, 1])])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_episode_ends_with_what_is_left_over(ranks, num_prompts, right):
    # NVIDIA-NeMo/labs-molt#85, and one rank out of prompts (17 on 2 and 4 ranks).
    steps = dealt(ranks, num_prompts, 16)
    assert [sum(map(len, step)) for step in steps] == right
    assert sorted(row for step in steps for rows in step for row in rows) == list(range(num_prompts))
    for step in steps:
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_collect_steps_do_not_depend_on_the_number_of_ranks():
    alone = [sorted(step[0]) for step in dealt(1, 30, 8, episodes=2)]
    assert [sorted(chain.from_iterable(step)) for step in dealt(4, 30, 8, episodes=2)] == alone


def test_episodes_and_seeds_have_orders_of_their_own():
    first, second = dealt(1, 8, 4)[0], dealt(1, 8, 4, seed=1)[0]
    assert first != second
    episodes = dealt(1, 8, 4, episodes=2)
    assert episodes[:2] != episodes[2:]
    assert sorted(row for step in episodes[2:] for rows in step for row in rows) == list(range(8))


@pytest.mark.parametrize("first", range(9))
def test_resumed_dealing_goes_on_where_it_stopped(first):
    # Three collect steps an episode; a resumed run may also stand at the very end.
    assert dealt(2, 10, 4, episodes=3, first=first) == dealt(2, 10, 4, episodes=3)[first:]
