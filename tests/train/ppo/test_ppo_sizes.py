"""Sizes of a PPO run: what trains, what cannot, and the numbers in the message."""

from __future__ import annotations

import pytest

from multipack.train.ppo.sizes import PPOSizes, buffer_sizes, check_prompts, collect_sizes


def sizes(**changes):
    values = {
        "num_replicas": 8,
        "rollout_batch_size": 64,
        "num_collect_steps": 1,
        "train_batch_size": 64,
        "update_mode": "epochs",
        "num_update_steps": 1,
    }
    return PPOSizes(**values | changes)


# The history's run: 64 experiences over 8 ranks; the local batches that its maintainers and its user tried. A
# local batch of 8 makes a global one of 64, which one buffer fills exactly once; 16 and 32 never fill and
# used to train nothing.
HISTORY = [(1, 8), (2, 4), (3, 3), (4, 2), (8, 1), (9, None), (16, None), (32, None)]


@pytest.mark.parametrize(("local_batch", "steps"), HISTORY)
def test_history_command_and_its_neighbours(local_batch, steps):
    if steps is None:
        with pytest.raises(ValueError, match=rf"64 < {8 * local_batch}\b"):
            sizes(train_batch_size=8 * local_batch)
    else:
        assert sizes(train_batch_size=8 * local_batch).steps_per_iteration == steps


def test_history_command_names_the_sizes_that_work():
    with pytest.raises(ValueError) as raised:
        sizes(train_batch_size=32 * 8)
    message = str(raised.value)
    assert "64 < 256" in message
    assert "(32 a rank)" in message
    assert "train_batch_size 64 or less (8 a rank)" in message
    assert "rollout_batch_size 256 or more" in message
    assert "num_collect_steps 4 or more" in message
    for remedy in ({"train_batch_size": 64}, {"rollout_batch_size": 256}, {"num_collect_steps": 4}):
        assert sizes(**{"train_batch_size": 256} | remedy).steps_per_iteration == 1


@pytest.mark.report("hpcaitech/ColossalAI#5066")
def test_256_experiences_give_the_history_one_step():
    # The report's second run: 32 a rank on 8 ranks.
    enough = sizes(rollout_batch_size=256, train_batch_size=256)
    assert (enough.prompts_per_rank, enough.steps_per_iteration) == (32, 1)


@pytest.mark.parametrize(
    ("mode", "count", "train", "steps", "ratio"),
    [
        ("epochs", 4, 16, 16, 4.0),  # four passes of four steps
        ("epochs", 1, 48, 2, 1.0),  # 48 and the 16 that are left
        ("steps", 4, 16, 4, 1.0),
        ("steps", 10, 64, 10, 10.0),  # the buffer ten times: the ratio is free
    ],
)
def test_optimizer_steps_and_replay_ratio(mode, count, train, steps, ratio):
    chosen = sizes(update_mode=mode, num_update_steps=count, train_batch_size=train)
    assert chosen.steps_per_iteration == steps
    assert chosen.replay_ratio == ratio


@pytest.mark.parametrize(("prompts", "remedy"), [(60, "56 or 64"), (7, "Use 8"), (65, "64 or 72")])
@pytest.mark.report("huggingface/accelerate#358")
def test_every_rank_gets_the_same_number_of_prompts(prompts, remedy):
    with pytest.raises(ValueError, match=rf"rollout_batch_size is {prompts} prompts for 8 ranks.*{remedy}"):
        sizes(rollout_batch_size=prompts, train_batch_size=8)


def test_optimizer_step_has_work_for_every_rank():
    with pytest.raises(ValueError, match=r"train_batch_size is 7 sequences for 8 ranks.*at least 8"):
        sizes(train_batch_size=7)


@pytest.mark.parametrize(
    "name", ["rollout_batch_size", "num_collect_steps", "train_batch_size", "num_update_steps"]
)
def test_zero_of_anything_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; below 1 the run would train nothing"):
        sizes(**{name: 0})


def test_uneven_training_batches_need_no_divisibility():
    # OpenRLHF#397 asks for an error where 100 sequences do not divide into micro-batches of 2 on 8 ranks
    # (6.25). Here micro-batches are packed by tokens, and any number of sequences from the number of ranks on
    # is dealt evenly.
    assert sizes(rollout_batch_size=128, train_batch_size=100).steps_per_iteration == 2


@pytest.mark.parametrize(
    ("num_prompts", "right"), [(30, [16, 14]), (20, [16, 4]), (10, [10]), (32, [16, 16])]
)
@pytest.mark.report("NVIDIA-NeMo/labs-molt#85")
def test_collect_steps_take_every_prompt_once(num_prompts, right):
    # Prompts that the batch does not divide must end, each once an episode.
    assert list(collect_sizes(num_prompts, 16, 1)) == right
    assert list(collect_sizes(num_prompts, 16, 2)) == right * 2


def test_iterations_go_on_across_episodes():
    chosen = sizes(num_replicas=1, rollout_batch_size=16, num_collect_steps=3, train_batch_size=8)
    # Two episodes of 16 and 4; three collect steps an iteration: (16 + 4 + 16), then the 4 that are left.
    assert buffer_sizes(chosen, 20, 2) == [36, 4]


@pytest.mark.report("LeapLabTHU/Absolute-Zero-Reasoner#14")
def test_too_few_prompts_are_found_before_generation():
    # 64 prompts, 40 too long, batch 32: the loader was empty.
    chosen = sizes(rollout_batch_size=32, train_batch_size=32)
    with pytest.raises(ValueError, match=r"64 prompts, 40 of them dropped.*leave 24.*24 < 32") as raised:
        check_prompts(chosen, num_prompts=24, num_dropped=40, num_episodes=1)
    assert "train_batch_size of at most 24" in str(raised.value)
    check_prompts(sizes(rollout_batch_size=32, train_batch_size=24), 24, 40, 1)


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match=r"5 prompts, 5 of them dropped.*nothing to generate from"):
        check_prompts(sizes(), num_prompts=0, num_dropped=5, num_episodes=1)
